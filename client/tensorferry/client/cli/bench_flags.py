"""The flags of `tensorferry bench`, checked and read."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

from tensorferry.client.cli.array_files import read_archive, read_array
from tensorferry.client.cli.infer import parameter
from tensorferry.client.cli.parser import CommandParser
from tensorferry.client.cli.server_flags import add_connection_flags, add_version, target_address
from tensorferry.client.connection.target import TARGET_VARIABLE, default_targets
from tensorferry.client.load.conditions import BadCondition, Condition, condition
from tensorferry.client.load.run import default_processes
from tensorferry.client.load.steps import BadLoad, Step, concurrencies, rates
from tensorferry.protos.tensors import Array

# The kinds of load by their flag, as the results name them.
MODES = {"concurrency": "closed", "rate": "open", "trace": "trace", "find_rate": "open"}
_DEFAULT_CONCURRENCY = "1:64"
MOST_SECONDS = 86_400.0
_MOST_TIMEOUT = 600.0

_HELP = {
    "--concurrency": "requests in flight (closed loop): a number, a list 1,8,32, or a range 1:256, which doubles "
    f"(default: {_DEFAULT_CONCURRENCY})",
    "--rate": "requests per second, sent whether or not the others are answered (open loop): a number, a list or a "
    "range. Latencies are from the intended time of sending",
    "--trace": 'recorded arrivals to send again: JSON lines {"at": SECONDS, "rows": N}, or the server\'s access log in JSON',
    "--find-rate": "find the largest rate that meets a condition, such as p99<20ms, by bisection: an open loop, in which nearly "
    "all requests are answered, and none with an error",
    "--arrivals": "times between the requests of --rate: random (default) or all the same",
    "--duration": "time of each measurement (default: 5, or that of the trace)",
    "--requests": "send N requests at each load, without a warm-up, in place of --duration",
    "--warmup": "time before each measurement, under the same load (default: 1; with --trace 0)",
    "--timeout": "gRPC deadline of each request; with --stream the client checks it (default: %(default)g)",
    "--stream": "send the requests over streams, one on each connection",
    "--processes": "processes that send (default: half of the cores, at most 8; here "
    f"{default_processes()}). A warning says when they are the limit",
    "--connections": "connections of each process (default: one for each 64 requests in flight)",
    "--seed": "number that decides random inputs and arrivals (default: %(default)s)",
    "--rows": "rows of each request (default: 1)",
    "--input": "array of an input as NAME=FILE.npy, or of several as FILE.npz; its rows are sent in turn "
    "(default: random values by the model's metadata)",
    "--shape": "shape of a random input whose dimensions the model leaves open, such as ids:128, without the rows",
    "--parameter": "request parameter, as for tensorferry infer",
    "--json": "write all results to FILE, for programs and for --compare",
    "--html": "write a report with plots to FILE",
    "--csv": "write a line for each load to FILE",
    "--assert": "condition that each load must meet, such as p99<50ms or errors<0.1%%; may be repeated. If one is not met, the "
    "exit code is 1 (default: no request may fail)",
    "--compare": "file of --json from another test; its figures are shown beside the new ones",
}


def bench_parser() -> CommandParser:
    """Return the parser of the command."""
    parser = CommandParser(
        prog="tensorferry bench",
        description="Measure a model of a running server under load: throughput, latencies, errors, and the server's own times.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "target",
        type=target_address,
        metavar="TARGET",
        nargs="?",
        help=f"address of the server, as HOST:PORT (default: the environment variable {TARGET_VARIABLE}, otherwise {default_targets({})[0]})",
    )
    parser.add_argument("model", metavar="MODEL")
    add_version(parser)
    _add_load(parser.add_argument_group("load"))
    _add_requests(parser.add_argument_group("requests"))
    _add_output(parser.add_argument_group("output"))
    server = parser.add_argument_group("server")
    server.add_argument(
        "--target",
        dest="target_flag",
        metavar="HOST:PORT",
        type=target_address,
        help="the same as TARGET, as in the other commands",
    )
    add_connection_flags(server)
    return parser


def _add_load(load: argparse._ArgumentGroup) -> None:
    add = partial(_add, load)
    add("--concurrency", metavar="N", type=_loads(concurrencies))
    add("--rate", metavar="R", type=_loads(rates))
    add("--trace", metavar="FILE", type=Path)
    add("--find-rate", metavar="CONDITION", type=_condition)
    add("--arrivals", choices=("poisson", "constant"))
    add("--duration", metavar="SECONDS", type=_seconds(0.1, MOST_SECONDS))
    add("--requests", metavar="N", type=_whole(1, 1_000_000_000))
    add("--warmup", metavar="SECONDS", type=_seconds(0.0, MOST_SECONDS))
    add("--timeout", metavar="SECONDS", type=_seconds(0.001, _MOST_TIMEOUT), default=10.0)
    add("--stream", action="store_true")
    add("--processes", metavar="N", type=_whole(1, 256))
    add("--connections", metavar="N", type=_whole(1, 1024))
    add("--seed", metavar="N", type=_whole(0, 2**32), default=1)


def _add_requests(requests: argparse._ArgumentGroup) -> None:
    add = partial(_add, requests)
    add("--rows", metavar="N", type=_whole(1, 1_000_000), default=1)
    add("--input", metavar="[NAME=]FILE", action="append", type=_input, default=[])
    add("--shape", metavar="NAME:DIMS", action="append", type=_shape, default=[])
    add("--parameter", metavar="NAME=VALUE", action="append", type=parameter, default=[])


def _add_output(output: argparse._ArgumentGroup) -> None:
    for flag in ("--json", "--html", "--csv", "--compare"):
        _add(output, flag, metavar="FILE", type=Path)
    _add(
        output,
        "--assert",
        metavar="CONDITION",
        action="append",
        type=_condition,
        default=[],
        dest="conditions",
    )


def _add(group: argparse._ArgumentGroup, flag: str, **options: Any) -> None:
    group.add_argument(flag, help=_HELP[flag], **options)


def mode_of(parser: CommandParser, arguments: argparse.Namespace) -> str:
    """Return which of --concurrency, --rate and --trace is used; exit with 2 if it is more than one."""
    given = [mode for mode in MODES if getattr(arguments, mode) is not None]
    if len(given) > 1:
        second, first = (f"--{mode.replace('_', '-')}" for mode in (given[1], given[0]))
        parser.error(f"argument {second}: not allowed with {first}: give one of them")
    if not given:
        arguments.concurrency = concurrencies(_DEFAULT_CONCURRENCY)
        given = ["concurrency"]
    if arguments.arrivals is not None and given not in (["rate"], ["find_rate"]):
        parser.error("argument --arrivals: only allowed with --rate and --find-rate")
    if arguments.requests is not None:
        others = ("duration", "warmup", "trace", "find_rate")
        if refused := [other for other in others if getattr(arguments, other) is not None]:
            parser.error(
                f"argument --requests: not allowed with --{refused[0].replace('_', '-')}: give one of them"
            )
    return given[0]


def read_inputs(parser: CommandParser, given: Sequence[tuple[str, Path]]) -> Mapping[str, Array]:
    """Return the arrays of --input by name; exit with 2 if a file cannot be read or a name is repeated."""
    found: dict[str, Array] = {}
    for name, path in given:
        try:
            if name:
                with path.open("rb") as file:
                    arrays = {name: read_array(file)}
            else:
                arrays = read_archive(path)
        except (OSError, ValueError, BadZipFile) as error:
            parser.error(
                f"argument --input: {str(path)!r} cannot be read ({error}): give NAME=FILE.npy or FILE.npz"
            )
        for key, array in arrays.items():
            if key in found:
                parser.error(f"argument --input: {key!r} is given more than once: give it once")
            found[key] = array
    return found


def _loads(read: Callable[[str], tuple[Step, ...]]) -> Callable[[str], tuple[Step, ...]]:
    def loads(text: str) -> tuple[Step, ...]:
        try:
            return read(text)
        except BadLoad as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return loads


def _condition(text: str) -> Condition:
    try:
        return condition(text)
    except BadCondition as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _seconds(least: float, most: float) -> Callable[[str], float]:
    def seconds(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"expected seconds from {least:g} to {most:g}, got {text!r}")
        return value

    return seconds


def _whole(least: int, most: int) -> Callable[[str], int]:
    def whole(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"expected a whole number from {least} to {most}, got {text!r}")
        return int(text)

    return whole


def _input(text: str) -> tuple[str, Path]:
    name, equals, file = text.partition("=")
    return (name, Path(file)) if equals else ("", Path(text))


def _shape(text: str) -> tuple[str, tuple[int, ...]]:
    name, colon, dims = text.rpartition(":")
    parts = dims.split(",")
    if not (name and colon) or not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"expected NAME:DIMS such as image:3,224,224, got {text!r}")
    return name, tuple(map(int, parts))
