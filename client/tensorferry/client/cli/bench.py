"""`tensorferry bench`: a load test of a model on a running server."""

from __future__ import annotations

import argparse
import math
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import grpc

from tensorferry.client.cli.bench_flags import MODES, bench_parser, read_arguments
from tensorferry.client.cli.inputs import shapes_of, without_inputs
from tensorferry.client.cli.parser import INTERRUPTED
from tensorferry.client.cli.server_flags import ServerConnection, with_connection
from tensorferry.client.connection.endpoints import connections_for
from tensorferry.client.connection.target import TARGET_VARIABLE
from tensorferry.client.errors import InferenceError, Unimplemented
from tensorferry.client.load import result_file, tables
from tensorferry.client.load.conditions import Condition, find_rate, meets
from tensorferry.client.load.records import LoadError, Plan, Target
from tensorferry.client.load.requests import RequestMaker
from tensorferry.client.load.results import Interval, StepResult
from tensorferry.client.load.run import LoadProcesses
from tensorferry.client.load.server_statistics import StatisticsReader
from tensorferry.client.load.steps import Step
from tensorferry.client.messages import checks
from tensorferry.client.messages.metadata import ModelMetadata, TensorMetadata, server_processes
from tensorferry.client.threads.client import InferenceClient
from tensorferry.protos import tensors
from tensorferry.protos.tensors import Array

# Time for calls beside the load: metadata, and the first request, whose model may be cold; and statistics.
_CALL_SECONDS, _STATISTICS_SECONDS = 60.0, 2.0


def main(argv: Sequence[str]) -> int:
    """Run the test; return 0, 1 after one line on stderr, or 130 after Ctrl-C. The steps so far are shown in any case."""
    parser = bench_parser()
    arguments = read_arguments(parser, argv)
    arguments.command = shlex.join(["tensorferry", "bench", *_without_values_of_headers(argv)])

    def run(connection: ServerConnection) -> int:
        address, *others = connection.targets
        if others:
            parser.error(
                f"{TARGET_VARIABLE} names {len(connection.targets)} servers: give one TARGET to measure"
            )
        tls, metadata = connection.tls, connection.metadata
        target = Target(address, tls, metadata, arguments.timeout, arguments.stream)
        # For calls beside the load: over one connection, so to one process, whose statistics are read. The requests are
        # compared with the metadata when they are made.
        with InferenceClient(
            address, tls=tls, metadata=metadata, check=False, retry=None, connections=1
        ) as client:
            return _bench(arguments, target, client)

    return with_connection(parser, arguments, run)


def _bench(arguments: argparse.Namespace, target: Target, client: InferenceClient) -> int:
    metadata = _metadata(client, arguments.model, arguments.model_version, arguments.input)
    arguments.plan = replace(arguments.plan, least_connections=connections_for(server_processes(metadata)))
    bodies = _bodies(arguments, client, metadata)
    named = (arguments.model, arguments.model_version)
    reader = StatisticsReader(lambda: client.statistics(*named, timeout=_STATISTICS_SECONDS))
    about = _about(arguments, target, client)
    results: list[StepResult] = []
    interrupted, failure = False, None
    try:
        _run(arguments, target, bodies, reader, results)
    except KeyboardInterrupt:
        interrupted = True
    except LoadError as error:
        if not results:
            raise
        failure = str(error)
    if not results:
        print("tensorferry bench: interrupted before the first step had ended", file=sys.stderr)
        return INTERRUPTED
    find: Condition | None = arguments.find_rate
    if find is not None:
        results.sort(key=lambda result: result.step.rate or 0.0)
    contents = result_file.document(about, results)
    lines = tables.table(contents)
    if find is not None and results[-1].step.rate is not None:
        lines.append(_found(results, find))
    if reader.missing:
        lines.append(f"no figures of the server's side: {tables.plain(reader.missing)}")
    lines += tables.errors_and_warnings(contents)
    other_name, other = arguments.compare or ("", None)
    if other is not None:
        lines += ["", *tables.comparison_table(result_file.compare(contents, other), other_name)]
    # The reader may end first, as `head` does.
    with suppress(BrokenPipeError):
        print("\n".join(lines), flush=True)
    if arguments.json is not None:
        result_file.write(arguments.json, contents)
    if arguments.csv is not None:
        result_file.write_csv(arguments.csv, contents)
    if arguments.html is not None:
        result_file.write_report(arguments.html, contents, other, other_name)
    if failure is not None:
        print(f"tensorferry bench: {failure}", file=sys.stderr)
        return 1
    if interrupted:
        return INTERRUPTED
    if not any(result.answered for result in results):
        print("tensorferry bench: no request was answered", file=sys.stderr)
        return 1
    if find is not None and not arguments.conditions:
        return 0 if any(meets(result, find) for result in results) else 1
    complaints = [text for result in results for text in _complaints(result, arguments.conditions)]
    for text in complaints:
        print(f"tensorferry bench: {text}", file=sys.stderr)
    return 1 if complaints else 0


def _about(arguments: argparse.Namespace, target: Target, client: InferenceClient) -> dict[str, Any]:
    """Return the fields of a document that describe the test."""
    plan: Plan = arguments.plan
    return {
        "tool": f"tensorferry {version('tensorferry')}",
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": arguments.command,
        "target": target.address,
        "server": _server_name(client),
        "model": arguments.model,
        "model_version": arguments.model_version,
        "mode": MODES[arguments.mode],
        "arrivals": plan.arrivals if arguments.mode == "rate" else None,
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


def _bodies(
    arguments: argparse.Namespace, client: InferenceClient, metadata: ModelMetadata
) -> Mapping[int, Sequence[bytes]]:
    """Return the requests by their number of rows."""
    plan = arguments.plan
    maker = RequestMaker(
        metadata,
        arguments.model_version,
        arguments.input,
        shapes_of(arguments.shape, metadata),
        arguments.parameter,
        plan.seed,
    )
    sizes = sorted({arrival.rows for arrival in plan.trace}) or [plan.rows]
    bodies = {rows: maker.requests(rows) for rows in sizes}
    if not arguments.stream:
        # Once, so that a wrong request fails before the load begins.
        try:
            client.infer(
                arguments.model,
                maker.inputs(sizes[0]),
                version=arguments.model_version,
                timeout=_CALL_SECONDS,
                parameters=arguments.parameter,
            )
        except InferenceError as error:
            if metadata.inputs:
                raise
            raise without_inputs(error, metadata) from None
    return bodies


def _metadata(
    client: InferenceClient, model: str, model_version: str, arrays: Mapping[str, Array]
) -> ModelMetadata:
    try:
        metadata = client.metadata(model, model_version, timeout=_CALL_SECONDS)
    except Unimplemented:
        if not arrays:
            raise
        metadata = ModelMetadata(model, (), "", (), ())
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


def _server_name(client: InferenceClient) -> str | None:
    """Return name and version of the server; None if it does not say."""
    try:
        answer = client.server_metadata(timeout=_CALL_SECONDS)
    except InferenceError:
        return None
    return f"{answer.name} {answer.version}".strip()


def _run(
    arguments: argparse.Namespace,
    target: Target,
    bodies: Mapping[int, Sequence[bytes]],
    reader: StatisticsReader,
    results: list[StepResult],
) -> None:
    """Run the steps, and add their results, which are complete after each step.

    With --find-rate the only step gives the capacity, and the results are those of the rates that are tried.
    """
    plan: Plan = arguments.plan
    live = sys.stderr.isatty()
    seconds = max(1, math.floor(plan.duration)) if plan.requests is None else None

    def progress(step: Step, number: int, interval: Interval) -> None:
        if live:
            print(tables.progress_line(step, number, seconds, interval), file=sys.stderr, flush=True)

    with LoadProcesses(plan, arguments.steps, target, bodies, reader, progress) as processes:
        for step in arguments.steps:
            results.append(processes.run(step))
        if arguments.find_rate is not None and results[-1].answered:
            capacity = results.pop().requests_per_second
            for result in find_rate(processes.run, arguments.find_rate, capacity):
                results.append(result)


def _complaints(result: StepResult, conditions: Sequence[Condition]) -> list[str]:
    """Return a text for each condition that a load does not meet; without conditions no request may fail."""
    label = result.step.label
    if not conditions and result.failed:
        failed = f"{result.failed:,} of {result.answered + result.failed:,} requests failed"
        return [f"{label}: {failed}; --assert errors<1% allows some"]
    found = []
    for wanted in conditions:
        if not wanted.holds(result):
            value = wanted.value(result)
            shown = "no request was answered" if value is None else f"it is {_shown(wanted.figure, value)}"
            found.append(f"{label}: {wanted.text} is not met: {shown}")
    return found


def _shown(figure: str, value: float) -> str:
    if figure == "errors":
        return f"{value * 100:.4g}%"
    return f"{value:.4g}/s" if figure == "rate" else tables.seconds_text(value)


def _found(results: Sequence[StepResult], wanted: Condition) -> str:
    good = [result for result in results if meets(result, wanted)]
    if not good:
        return f"no rate met {wanted.text}; the lowest that was tried is {tables.number_text(results[0].step.rate or 0.0)} per second"
    return f"largest rate with {wanted.text}: {tables.number_text(good[-1].step.rate or 0.0)} per second"


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
