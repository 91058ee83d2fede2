"""`tensorferry inspect`: would a model batch, what stands in the way, and what do batches take on this machine?"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tensorferry.server.config.flags import CommandParser, add_flags, read_flags
from tensorferry.server.errors import ConfigError, StartError
from tensorferry.server.inspection.inspection import Wanted, inspect_model
from tensorferry.server.inspection.json_form import failure_of, json_of, model_of
from tensorferry.server.inspection.model_argument import MODEL_HELP, MODEL_OPTIONS, find_model
from tensorferry.server.inspection.text_form import text_of
from tensorferry.server.models.fetched_sources import fetched_sources
from tensorferry.server.names import printable_lines
from tensorferry.server.telemetry import logs

_PROGRAM = "tensorferry inspect"
# As shells report a program that SIGINT ends.
_INTERRUPTED = 130
_MOST_ROWS = 1 << 20


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = sorted({int(size) for size in text.split(",")})
    except ValueError:
        sizes = [0]
    if not 1 <= sizes[0] <= sizes[-1] <= _MOST_ROWS:
        raise argparse.ArgumentTypeError(
            f"is {text!r}; it must be numbers of rows from 1 to {_MOST_ROWS}, such as 1,8,32"
        )
    return tuple(sizes)


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (0 < number < math.inf):
        raise argparse.ArgumentTypeError(f"is {text!r}; it must be a number above 0")
    return number


def _length(text: str) -> tuple[str, int]:
    """Return an axis and its length; "" for all axes."""
    axis, equals, number = text.rpartition("=")
    if not number.isascii() or not number.isdigit() or int(number) < 1 or (equals and not axis):
        raise argparse.ArgumentTypeError(
            f"is {text!r}; it must be a number of at least 1, such as 128, or an axis with one, such as sequence=128"
        )
    return axis, int(number)


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
    parser.add_argument("models", metavar="MODEL", nargs="+", help=MODEL_HELP)
    parser.add_argument("--config", metavar="FILE", help="TOML file (also TENSORFERRY_CONFIG)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument(
        "--no-measure", action="store_true", help="run no batches but those of the batching check"
    )
    parser.add_argument(
        "--sizes",
        metavar="N,...",
        type=_sizes,
        help="rows of the batches to measure (default: 1, 2, 4 ... 64, or up to --max-batch-size if that is more)",
    )
    parser.add_argument(
        "--length",
        metavar="[AXIS=]N",
        type=_length,
        action="append",
        default=[],
        help="length of the inputs' variable axes other than the batch axis, or of the one with that name; can be given "
        "several times (default: the first of 4, 16, 64, 224 and 1 with which the model runs)",
    )
    parser.add_argument(
        "--latency-ms",
        metavar="MS",
        type=_positive,
        action="append",
        default=[],
        help="show the largest batch that takes no longer, and its requests/s; can be given several times",
    )
    parser.add_argument(
        "--measure-seconds",
        metavar="SECONDS",
        type=_positive,
        default=60.0,
        help="longest time for the batches of a model; larger sizes are left out if they would take longer (default: 60)",
    )
    parser.add_argument(
        "--write-batched",
        metavar="OUT.onnx",
        type=Path,
        help="write the copy by which a server batches MODEL, whose first axis is fixed to 1; or a copy in which the batch axis of "
        "each tensor is its first, if it is another one",
    )
    add_flags(parser, MODEL_OPTIONS)
    return parser


def main(argv: Sequence[str]) -> int:
    """Return 0 whatever the verdicts, 1 if a model cannot be loaded, 2 for bad options."""
    arguments, flags = read_flags(_parser(), argv, MODEL_OPTIONS)
    # The output has what the loader's warnings say.
    flags["log-level"] = flags["log-level"] or os.environ.get("TENSORFERRY_LOG_LEVEL", "error")
    path = arguments["config"] or os.environ.get("TENSORFERRY_CONFIG")
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
    failed = False
    try:
        for argument in arguments["models"]:
            try:
                source, config = find_model(argument, flags, Path(path) if path else None)
                # Without the secrets of an address.
                argument = argument if source.origin is None else str(source.origin)
                logs.configure(config.log_format, config.log_level)
                if sys.stderr.isatty():
                    print(f"{_PROGRAM}: loading {argument} and running batches ...", file=sys.stderr)
                (source,) = fetched_sources([source], config)
                for found in inspect_model(source, config, wanted):
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
    return 1 if failed else 0
