"""`tensorferry inspect`: would a model batch, what stands in the way, and what do batches take on this machine?"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tensorferry.server.config.flags import CommandParser, add_flags, config_file, read_flags
from tensorferry.server.config.parsers import positive_number
from tensorferry.server.errors import ConfigError, StartError
from tensorferry.server.models.repository.fetched_sources import fetched_sources
from tensorferry.server.names import printable_lines
from tensorferry.server.observability.logs import logs
from tensorferry.server.onnx.inspection.inspection import Wanted, inspect_model
from tensorferry.server.onnx.inspection.json_form import failure_of, json_of, model_of
from tensorferry.server.onnx.inspection.model_argument import MODEL_HELP, MODEL_OPTIONS, find_model
from tensorferry.server.onnx.inspection.text_form import text_of

_PROGRAM = "tensorferry inspect"
# As shells report a program that SIGINT ends.
_INTERRUPTED = 130
# A model of --fail-if-unbatched.
_UNBATCHED = 3
_MOST_ROWS = 1 << 20

_T = TypeVar("_T")


def _checked(parse: Callable[[str], _T], expected: str) -> Callable[[str], _T]:
    """Return a type of an argument, whose error says what was expected."""

    def checked(text: str) -> _T:
        try:
            return parse(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"is {text!r}; it must be {expected}") from None

    return checked


def _sizes(text: str) -> tuple[int, ...]:
    sizes = tuple(sorted({int(size) for size in text.split(",")}))
    if not 1 <= sizes[0] <= sizes[-1] <= _MOST_ROWS:
        raise ValueError
    return sizes


def _length(text: str) -> tuple[str, int]:
    """Return an axis and its length; "" for all axes."""
    axis, equals, number = text.rpartition("=")
    if not number.isascii() or not number.isdigit() or int(number) < 1 or (equals and not axis):
        raise ValueError
    return axis, int(number)


_SIZES = _checked(_sizes, f"numbers of rows from 1 to {_MOST_ROWS}, such as 1,8,32")
_LENGTH = _checked(_length, "a number of at least 1, such as 128, or an axis with one, such as sequence=128")
_POSITIVE = _checked(positive_number.parse, positive_number.allowed)

_SIZES_HELP = (
    "rows of the batches to measure (default: 1, 2, 4 ... 64, or up to --max-batch-size if that is more)"
)
_LENGTH_HELP = (
    "length of the inputs' variable axes other than the batch axis, or of the one with that name; can be given several "
    "times (default: the first of 4, 16, 64, 224 and 1 with which the model runs)"
)
_LATENCY_HELP = "show the largest batch that takes no longer, and its requests/s; can be given several times"
_SECONDS_HELP = "longest time for the batches of a model; larger sizes are left out if they would take longer (default: 60)"
_WRITE_HELP = (
    "write the copy by which a server batches MODEL, whose first axis is fixed to 1; or a copy in which the batch axis of "
    "each tensor is its first, if it is another one"
)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog=_PROGRAM,
        usage=f"{_PROGRAM} MODEL ... [--FLAG VALUE ...]",
        description="Print how a server would batch a model, which node or output decides that, and what to change if it is not "
        "batched. Then run batches on this machine: their time, their memory, the best size, and what a bound of latency "
        "admits. Of a Python file, each model is printed. Nothing is served.",
        epilog="The other options are those of tensorferry serve; environment variables work, too.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add_flags(parser, MODEL_OPTIONS)
    add("models", metavar="MODEL", nargs="+", help=MODEL_HELP)
    add("--json", action="store_true", help="print JSON instead of text")
    add(
        "--fail-if-unbatched",
        action="store_true",
        help="exit with 3 if a model's requests would not share batches, for checks before a release",
    )
    add("--no-measure", action="store_true", help="run no batches but those of the batching check")
    add("--sizes", metavar="N,...", type=_SIZES, help=_SIZES_HELP)
    add("--length", metavar="[AXIS=]N", type=_LENGTH, action="append", default=[], help=_LENGTH_HELP)
    add("--latency-ms", metavar="MS", type=_POSITIVE, action="append", default=[], help=_LATENCY_HELP)
    add("--measure-seconds", metavar="SECONDS", type=_POSITIVE, default=60.0, help=_SECONDS_HELP)
    add("--write-batched", metavar="OUT.onnx", type=Path, help=_WRITE_HELP)
    return parser


def main(argv: Sequence[str]) -> int:
    """Return 0 whatever the verdicts, 1 if a model cannot be loaded, 2 for bad options.

    With --fail-if-unbatched, return 3 if the requests of a model would not share batches.
    """
    arguments, flags = read_flags(_parser(), argv, MODEL_OPTIONS)
    # The output has what the loader's warnings say.
    if "TENSORFERRY_LOG_LEVEL" not in os.environ:
        flags["log-level"] = flags["log-level"] or "error"
    lengths = dict(arguments["length"])
    wanted = Wanted(
        not arguments["no_measure"],
        arguments["sizes"],
        arguments["measure_seconds"],
        lengths.pop("", None),
        lengths,
        arguments["write_batched"],
    )
    if wanted.write_batched is not None and len(arguments["models"]) > 1:
        print(f"{_PROGRAM}: --write-batched takes one MODEL, got {len(arguments['models'])}", file=sys.stderr)
        return 2
    bounds = [milliseconds / 1e3 for milliseconds in arguments["latency_ms"]]
    printed: list[dict[str, Any]] = []
    failed = unbatched = False
    try:
        for argument in arguments["models"]:
            try:
                source, config = find_model(argument, flags, config_file(arguments))
                # Without the secrets of an address.
                argument = argument if source.origin is None else str(source.origin)
                logs.configure(config.log_format, config.log_level)
                if sys.stderr.isatty():
                    print(f"{_PROGRAM}: loading {argument} and running batches ...", file=sys.stderr)
                (source,) = fetched_sources([source], config)
                for found in inspect_model(source, config, wanted):
                    unbatched = unbatched or not found.decision.merges
                    if arguments["json"]:
                        printed.append(model_of(argument, found, bounds))
                    else:
                        print(text_of(found, bounds), end="\n\n", flush=True)
            except StartError as error:
                failed = True
                printed.append(failure_of(argument, error))
                print(printable_lines(f"{_PROGRAM}: {error}"), file=sys.stderr, flush=True)
    except ConfigError as error:
        print(printable_lines(f"{_PROGRAM}: {error}"), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return _INTERRUPTED
    if arguments["json"]:
        print(json.dumps(json_of(printed), indent=2))
    if failed:
        return 1
    return _UNBATCHED if unbatched and arguments["fail_if_unbatched"] else 0
