"""The flags of `tensorferry bench`, checked and read."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from tensorferry.client.cli.array_files import read_archive, read_array
from tensorferry.client.cli.infer import parameter
from tensorferry.client.cli.inputs import dimensions
from tensorferry.client.cli.parser import CommandParser, seconds, whole
from tensorferry.client.cli.server_flags import (
    SERVER_HELP,
    add_connection_flags,
    add_model,
    target_address,
    unique,
)
from tensorferry.client.connection.target import DEFAULT_TARGET, TARGET_VARIABLE
from tensorferry.client.load import result_file
from tensorferry.client.load.conditions import condition
from tensorferry.client.load.records import Plan
from tensorferry.client.load.result_file import Document
from tensorferry.client.load.run import default_processes
from tensorferry.client.load.steps import Arrival, BadOption, Step, concurrencies, rates, read_trace
from tensorferry.protos.tensors import Array

# The kinds of load by their flag, as the results name them.
MODES = {"concurrency": "closed", "rate": "open", "trace": "trace", "find_rate": "open"}
_DEFAULT_CONCURRENCY = "1:64"
# Requests in flight by which the capacity is measured.
_CAPACITY_IN_FLIGHT = 64
_MOST_SECONDS = 86_400.0
_MOST_TIMEOUT = 600.0

_T = TypeVar("_T")

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
    "--connections": "connections of each process (default: one for each 64 requests in flight, and enough to reach all processes "
    "of the server)",
    "--seed": "number that decides random inputs and arrivals (default: %(default)s)",
    "--rows": "rows of each request (default: 1)",
    "--input": "array of an input as NAME=FILE.npy, or of several as FILE.npz; its rows are sent in turn "
    "(default: random values by the model's metadata)",
    "--shape": "shape of a random input whose dimensions the model leaves open, such as ids:128, without the rows or with them",
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
        "bench",
        "Measure a model of a running server under load: throughput, latencies, errors, and the server's own times.",
    )
    parser.add_argument(
        "target",
        type=target_address,
        metavar="TARGET",
        nargs="?",
        help=f"address of the server, as HOST:PORT (default: the environment variable {TARGET_VARIABLE}, otherwise {DEFAULT_TARGET})",
    )
    add_model(parser)
    add = parser.flags("load", _HELP)
    add("--concurrency", metavar="N", type=_read(concurrencies))
    add("--rate", metavar="R", type=_read(rates))
    add("--trace", metavar="FILE", type=Path)
    add("--find-rate", metavar="CONDITION", type=_read(condition))
    add("--arrivals", choices=("poisson", "constant"))
    add("--duration", metavar="SECONDS", type=seconds(0.1, _MOST_SECONDS))
    add("--requests", metavar="N", type=whole(1, 1_000_000_000))
    add("--warmup", metavar="SECONDS", type=seconds(0.0, _MOST_SECONDS))
    add("--timeout", metavar="SECONDS", type=seconds(0.001, _MOST_TIMEOUT), default=10.0)
    add("--stream", action="store_true")
    add("--processes", metavar="N", type=whole(1, 256))
    add("--connections", metavar="N", type=whole(1, 1024))
    add("--seed", metavar="N", type=whole(0, 2**32), default=1)
    add = parser.flags("requests", _HELP)
    add("--rows", metavar="N", type=whole(1, 1_000_000), default=1)
    add("--input", metavar="[NAME=]FILE", action="extend", type=_arrays, default=[])
    add("--shape", metavar="[NAME:]DIMS", action="append", type=dimensions, default=[])
    add("--parameter", metavar="NAME=VALUE", action="append", type=parameter, default=[])
    add = parser.flags("output", _HELP)
    for flag in ("--json", "--html", "--csv"):
        add(flag, metavar="FILE", type=_output)
    add("--compare", metavar="FILE", type=_read(_document))
    add(
        "--assert", metavar="CONDITION", dest="conditions", action="append", type=_read(condition), default=[]
    )
    add = parser.flags("server", {**SERVER_HELP, "--target": "the same as TARGET, as in the other commands"})
    add("--target", dest="target_flag", metavar="HOST:PORT", type=target_address)
    add_connection_flags(add)
    return parser


def read_arguments(parser: CommandParser, argv: Sequence[str]) -> argparse.Namespace:
    """Return the arguments, with `mode`, `steps` and `plan`; exit with 2 if they do not go together."""
    arguments = parser.parse(argv)
    if arguments.target_flag is not None:
        if arguments.target is not None:
            parser.error("argument --target: not allowed with TARGET: give one of them")
        arguments.target = arguments.target_flag
    arguments.mode = _mode(parser, arguments)
    for name in ("input", "parameter"):
        setattr(arguments, name, unique(parser, f"--{name}", getattr(arguments, name)))
    if arguments.mode == "find_rate":
        # The capacity, which bounds the search.
        arguments.steps = (Step(concurrency=_CAPACITY_IN_FLIGHT),)
    else:
        arguments.steps = (Step(),) if arguments.mode == "trace" else getattr(arguments, arguments.mode)
    arguments.plan = _plan(parser, arguments)
    return arguments


def _mode(parser: CommandParser, arguments: argparse.Namespace) -> str:
    """Return which of the kinds of load is used."""
    given = [mode for mode in MODES if getattr(arguments, mode) is not None]
    if len(given) > 1:
        second, first = (f"--{mode.replace('_', '-')}" for mode in (given[1], given[0]))
        parser.error(f"argument {second}: not allowed with {first}: give one of them")
    if not given:
        arguments.concurrency = concurrencies(_DEFAULT_CONCURRENCY)
        given = ["concurrency"]
    if arguments.arrivals is not None and given[0] not in ("rate", "find_rate"):
        parser.error("argument --arrivals: only allowed with --rate and --find-rate")
    if arguments.requests is not None:
        for other in ("duration", "warmup", "trace", "find_rate"):
            if getattr(arguments, other) is not None:
                other = other.replace("_", "-")
                parser.error(f"argument --requests: not allowed with --{other}: give one of them")
    return given[0]


def _plan(parser: CommandParser, arguments: argparse.Namespace) -> Plan:
    warmup, duration = arguments.warmup, arguments.duration
    trace: tuple[Arrival, ...] = ()
    if arguments.trace is not None:
        try:
            trace = read_trace(arguments.trace, arguments.rows)
        except (OSError, BadOption) as error:
            parser.error(f"argument --trace: {error}")
        warmup = 0.0 if warmup is None else warmup
        # The end is exclusive, and the last request is to be sent.
        duration = duration or max(1.0, trace[-1].at + 1e-3 - warmup)
        if trace[-1].at < warmup:
            parser.error(f"argument --warmup: the trace takes {trace[-1].at:g} s, got {warmup:g}: shorten it")
    if arguments.requests is not None:
        warmup, duration = 0.0, _MOST_SECONDS
    return Plan(
        warmup=1.0 if warmup is None else warmup,
        duration=duration or 5.0,
        requests=arguments.requests,
        rows=arguments.rows,
        processes=arguments.processes or default_processes(),
        connections=arguments.connections,
        arrivals=arguments.arrivals or "poisson",
        seed=arguments.seed,
        trace=trace,
    )


def _read(read: Callable[[str], _T]) -> Callable[[str], _T]:
    """Return a function that reads the text of an option, with the errors of argparse."""

    def checked(text: str) -> _T:
        try:
            return read(text)
        except (OSError, BadOption) as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return checked


def _document(text: str) -> tuple[str, Document]:
    path = Path(text)
    return str(path), result_file.read(path)


def _output(text: str) -> Path:
    path = Path(text)
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{str(path.parent)!r} is no directory: make it first")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a directory: name a file in it")
    return path


def _arrays(text: str) -> list[tuple[str, Array]]:
    name, equals, file = text.partition("=")
    path = Path(file if equals else text)
    try:
        if not name or not equals:
            return list(read_archive(path).items())
        with path.open("rb") as opened:
            return [(name, read_array(opened))]
    except (OSError, ValueError) as error:
        expected = "give NAME=FILE.npy or FILE.npz"
        raise argparse.ArgumentTypeError(f"{str(path)!r} cannot be read ({error}): {expected}") from None
