"""`tensorferry bench`: a load test of a model on a running server."""

from __future__ import annotations

import argparse
import math
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import grpc

from tensorferry.client import errors
from tensorferry.client.cli.bench_flags import MODES, MOST_SECONDS, bench_parser, mode_of, read_inputs
from tensorferry.client.cli.inputs import without_inputs
from tensorferry.client.cli.parser import CommandParser
from tensorferry.client.cli.random_values import random_array
from tensorferry.client.cli.server_flags import connection_of, unique
from tensorferry.client.connection import channel
from tensorferry.client.connection.target import TARGET_VARIABLE
from tensorferry.client.errors import InferenceError, InvalidInput
from tensorferry.client.load import result_file, tables
from tensorferry.client.load.comparison import compare
from tensorferry.client.load.conditions import Condition, condition, find_rate, meets
from tensorferry.client.load.records import Plan, Target
from tensorferry.client.load.report import write_report
from tensorferry.client.load.requests import RequestMaker
from tensorferry.client.load.result_file import BadResults, Document
from tensorferry.client.load.results import Interval, StepResult
from tensorferry.client.load.run import LoadProcesses, default_processes
from tensorferry.client.load.server_statistics import StatisticsReader
from tensorferry.client.load.steps import Arrival, Step
from tensorferry.client.load.trace import BadTrace, read_trace
from tensorferry.client.messages import checks, codec
from tensorferry.client.messages.metadata import ModelMetadata, TensorMetadata
from tensorferry.client.messages.printable import one_line
from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos import inference_pb2_grpc, tensors
from tensorferry.protos.tensors import Array

_INTERRUPTED = 130
# Requests in flight by which the capacity is measured.
_CAPACITY_IN_FLIGHT = 64
# What holds unless other conditions are given.
_NO_ERRORS = condition("errors<0%")
# Time for calls beside the load: metadata, and the first request, whose model may be cold.
_CALL_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class _Server:
    """The server, called beside the load."""

    stub: inference_pb2_grpc.GRPCInferenceServiceStub
    metadata: channel.CallMetadata

    def call(self, method: str, request: object) -> Any:
        """Return the answer of a method; raise InferenceError."""
        try:
            return getattr(self.stub, method)(request, timeout=_CALL_SECONDS, metadata=self.metadata)
        except grpc.RpcError as error:
            raise errors.from_rpc(error) from None


def main(argv: Sequence[str]) -> int:
    """Run the test; return 0, 1 after one line on stderr, or 130 after Ctrl-C with the steps so far."""
    parser = bench_parser()
    arguments = parser.parse(argv)
    if arguments.target_flag is not None:
        if arguments.target is not None:
            parser.error("argument --target: not allowed with TARGET: give one of them")
        arguments.target = arguments.target_flag
    mode = mode_of(parser, arguments)
    arguments.input = read_inputs(parser, arguments.input)
    arguments.shape = unique(parser, "--shape", arguments.shape)
    arguments.parameter = unique(parser, "--parameter", arguments.parameter)
    connection = connection_of(parser, arguments)
    if len(connection.targets) > 1:
        parser.error(f"{TARGET_VARIABLE} names {len(connection.targets)} servers: give one TARGET to measure")
    other = _other(parser, arguments.compare)
    plan, steps = _plan(parser, arguments, mode)
    for option, path in (("--json", arguments.json), ("--html", arguments.html), ("--csv", arguments.csv)):
        if path is not None and not path.absolute().parent.is_dir():
            parser.error(f"argument {option}: {str(path.parent)!r} is no directory: make it first")
    address, metadata = connection.targets[0], connection.metadata
    target = Target(address, connection.tls, metadata, arguments.timeout, arguments.stream)
    credentials = channel.channel_credentials(connection.tls, None)
    options = channel.channel_options(channel.DEFAULT_MAX_MESSAGE_BYTES, ())
    try:
        with channel.opener(grpc)(address, credentials, options) as opened:
            server = _Server(inference_pb2_grpc.GRPCInferenceServiceStub(opened), metadata)
            return _bench(arguments, list(argv), mode, plan, steps, target, server, other)
    except InvalidInput as error:
        parser.error(str(error))
    except InferenceError as error:
        print(f"{parser.prog}: {address}: {tables.plain(str(error))}", file=sys.stderr)
    except OSError as error:
        print(f"{parser.prog}: {one_line(str(error))}", file=sys.stderr)
    return 1


def _other(parser: CommandParser, path: Path | None) -> Document | None:
    if path is None:
        return None
    try:
        return result_file.read(path)
    except (OSError, BadResults) as error:
        parser.error(f"argument --compare: {error}")


def _plan(parser: CommandParser, arguments: argparse.Namespace, mode: str) -> tuple[Plan, tuple[Step, ...]]:
    if mode == "find_rate":
        # The capacity, which bounds the search.
        steps: tuple[Step, ...] = (Step(concurrency=_CAPACITY_IN_FLIGHT),)
    else:
        steps = getattr(arguments, mode) if mode != "trace" else (Step(),)
    warmup, duration = arguments.warmup, arguments.duration
    trace: tuple[Arrival, ...] = ()
    if mode == "trace":
        try:
            trace = read_trace(arguments.trace, arguments.rows)
        except (OSError, BadTrace) as error:
            parser.error(f"argument --trace: {error}")
        warmup = 0.0 if warmup is None else warmup
        # The end is exclusive, and the last request is to be sent.
        duration = duration or max(1.0, trace[-1].at + 1e-3 - warmup)
        if trace[-1].at < warmup:
            parser.error(f"argument --warmup: the trace takes {trace[-1].at:g} s, got {warmup:g}: shorten it")
    if arguments.requests is not None:
        warmup, duration = 0.0, MOST_SECONDS
    return (
        Plan(
            warmup=1.0 if warmup is None else warmup,
            duration=duration or 5.0,
            requests=arguments.requests,
            rows=arguments.rows,
            processes=arguments.processes or default_processes(),
            connections=arguments.connections,
            arrivals=arguments.arrivals or "poisson",
            seed=arguments.seed,
            trace=trace,
        ),
        steps,
    )


def _bench(
    arguments: argparse.Namespace,
    argv: list[str],
    mode: str,
    plan: Plan,
    steps: Sequence[Step],
    target: Target,
    server: _Server,
    other: Document | None,
) -> int:
    model, model_version = arguments.model, arguments.model_version
    metadata = _metadata(server, model, model_version, arguments.input)
    maker = RequestMaker(
        metadata,
        model_version,
        draw=lambda tensor, shape, generator: random_array(tensor, shape, model, generator),
        arrays=arguments.input,
        shapes=arguments.shape,
        parameters=arguments.parameter,
        seed=plan.seed,
    )
    sizes = sorted({arrival.rows for arrival in plan.trace}) or [plan.rows]
    bodies = {rows: maker.requests(rows) for rows in sizes}
    if not arguments.stream:
        # Once, so that a wrong request fails before the load begins.
        try:
            codec.decode(server.call("ModelInfer", pb.ModelInferRequest.FromString(bodies[sizes[0]][0])))
        except InferenceError as error:
            if metadata.inputs:
                raise
            raise without_inputs(error, metadata) from None
    reader = StatisticsReader(server.stub, model, model_version, target.metadata)
    about = {
        "tool": f"tensorferry {version('tensorferry')}",
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["tensorferry", "bench", *_without_values_of_headers(argv)]),
        "target": target.address,
        "server": _server_name(server),
        "model": model,
        "model_version": model_version,
        "mode": MODES[mode],
        "arrivals": plan.arrivals if mode == "rate" else None,
        "stream": arguments.stream,
        "rows": plan.rows,
        "processes": plan.processes,
        "connections": plan.connections,
        "warmup_seconds": plan.warmup,
        "duration_seconds": plan.duration if plan.requests is None else None,
        "requests": plan.requests,
        "timeout_seconds": arguments.timeout,
        "client_cores": len(os.sched_getaffinity(0)),
        "client_python": platform.python_version(),
        "client_grpcio": grpc.__version__,
    }
    results, interrupted = _run(plan, steps, target, bodies, reader, arguments.find_rate)
    if not results:
        print("tensorferry bench: interrupted before the first step had ended", file=sys.stderr)
        return _INTERRUPTED
    contents = result_file.document(about, results)
    lines = tables.table(results, plan.rows)
    if arguments.find_rate is not None:
        lines.append(_found(results, arguments.find_rate))
    if reader.missing:
        lines.append(f"no figures of the server's side: {tables.plain(reader.missing)}")
    lines += tables.errors_and_warnings(results)
    if other is not None:
        differences = compare(results, result_file.steps_of(other))
        lines += ["", *tables.comparison_table(differences, str(arguments.compare))]
    # Before the table, because its reader may end first, as `head` does.
    if arguments.json is not None:
        result_file.write(arguments.json, contents)
    if arguments.csv is not None:
        result_file.write_csv(arguments.csv, contents)
    if arguments.html is not None:
        write_report(arguments.html, contents, other, str(arguments.compare or ""))
    print("\n".join(lines))
    if interrupted:
        return _INTERRUPTED
    if not any(result.answered for result in results):
        print("tensorferry bench: no request was answered", file=sys.stderr)
        return 1
    if arguments.find_rate is not None and not arguments.conditions:
        return 0 if any(meets(result, arguments.find_rate) for result in results) else 1
    return _check(results, arguments.conditions or [_NO_ERRORS])


def _check(results: Sequence[StepResult], conditions: Sequence[Condition]) -> int:
    """Return 1, after a line on stderr for each load that does not meet a condition, else 0."""
    code = 0
    for result in results:
        for wanted in conditions:
            # None fails: `errors<0%` would never hold.
            if not (wanted.holds(result) or (wanted is _NO_ERRORS and not result.failed)):
                code = 1
                print(f"tensorferry bench: {result.step.label}: {_shown(wanted, result)}", file=sys.stderr)
    return code


def _shown(wanted: Condition, result: StepResult) -> str:
    if wanted is _NO_ERRORS:
        return f"{result.failed:,} of {result.answered + result.failed:,} requests failed; --assert errors<1% allows some"
    value = wanted.value(result)
    if value is None:
        return f"{wanted.text} is not met: no request was answered"
    unit = "%" if wanted.figure == "errors" else "/s"
    text = f"{value * 100 if unit == '%' else value:.4g}{unit}"
    if wanted.figure not in ("errors", "rate"):
        text = tables.seconds_text(value)
    return f"{wanted.text} is not met: it is {text}"


def _found(results: Sequence[StepResult], wanted: Condition) -> str:
    good = [result for result in results if meets(result, wanted)]
    if not good:
        return f"no rate met {wanted.text}; the lowest that was tried is {tables.number_text(results[0].step.rate or 0.0)} per second"
    return f"largest rate with {wanted.text}: {tables.number_text(good[-1].step.rate or 0.0)} per second"


def _metadata(server: _Server, model: str, model_version: str, arrays: Mapping[str, Array]) -> ModelMetadata:
    try:
        answer = server.call("ModelMetadata", pb.ModelMetadataRequest(name=model, version=model_version))
    except errors.Unimplemented:
        if not arrays:
            raise
        answer = pb.ModelMetadataResponse(name=model)
    metadata = ModelMetadata.from_message(answer)
    if metadata.inputs:
        return metadata
    # The files say all that a request needs. Rows are on axis 0 if all files have as many.
    inputs = tuple(
        TensorMetadata(
            name,
            tensors.datatype_of(checks.array_of(name, array)),
            (-1, *array.shape[1:]) if array.ndim else (),
        )
        for name, array in arrays.items()
    )
    return replace(metadata, inputs=inputs)


def _server_name(server: _Server) -> str | None:
    """Return name and version of the server; None if it does not say."""
    try:
        answer = server.call("ServerMetadata", pb.ServerMetadataRequest())
    except InferenceError:
        return None
    return f"{answer.name} {answer.version}".strip()


def _run(
    plan: Plan,
    steps: Sequence[Step],
    target: Target,
    bodies: Mapping[int, Sequence[bytes]],
    reader: StatisticsReader,
    find: Condition | None,
) -> tuple[list[StepResult], bool]:
    """Run the steps; return their results, and whether Ctrl-C ended the test before the last.

    With `find`, the only step gives the capacity, and the results are those of the rates that are tried.
    """
    results: list[StepResult] = []
    live = sys.stderr.isatty()
    seconds = max(1, math.floor(plan.duration)) if plan.requests is None else None

    def progress(step: Step, number: int, interval: Interval) -> None:
        if live:
            print(tables.progress_line(step, number, seconds, interval), file=sys.stderr, flush=True)

    try:
        most = max((step.concurrency or plan.processes for step in steps), default=1)
        with LoadProcesses(min(plan.processes, most), target, bodies) as processes:

            def run(step: Step) -> StepResult:
                results.append(processes.run(plan, step, target.timeout, reader, progress))
                return results[-1]

            for step in steps:
                run(step)
            if find is not None:
                capacity = results.pop().requests_per_second
                return find_rate(run, find, capacity), False
    except KeyboardInterrupt:
        return results, True
    return results, False


def _without_values_of_headers(argv: Sequence[str]) -> list[str]:
    """Return the arguments without the values of headers, which may be secrets."""
    shown: list[str] = []
    for word in argv:
        if shown and shown[-1] == "--header":
            word = f"{word.partition('=')[0]}=..."
        elif word.startswith("--header="):
            word = f"--header={word.removeprefix('--header=').partition('=')[0]}=..."
        shown.append(word)
    return shown
