"""A load test from the side of the command: starts load processes, and adds up their reports."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext
from typing import Any

from tensorferry.client.load import process
from tensorferry.client.load.records import Failed, Part, Report, Target
from tensorferry.client.load.results import Interval, StepResult, StepTotals
from tensorferry.client.load.server_statistics import ServerTotals, difference
from tensorferry.client.load.steps import Arrival, Arrivals, Step, share

# Requests in flight on one connection, unless the number of connections is given. Proxies and
# servers often allow 100 streams on a connection, and gRPC delays calls above that.
_IN_FLIGHT_ON_A_CONNECTION = 64
_MOST_PROCESSES = 8
# Time from the start message to the start, in which it reaches all processes, and for an answer of
# a load process beyond the time that it needs.
_HEAD_START_SECONDS = 0.05
_PATIENCE_SECONDS = 60.0
_STOP_SECONDS = 5.0

# Returns the totals of the model; None if the server has none.
Statistics = Callable[[], ServerTotals | None]
# Called with the number of the interval from 0, and the interval of all processes together.
Progress = Callable[[Step, int, Interval], None]


class LoadError(OSError):
    """A load process failed; the message says how."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Options of all steps. Times are in seconds; `connections` is of each process, None for a default."""

    warmup: float = 1.0
    duration: float = 5.0
    rows: int = 1
    processes: int = 1
    connections: int | None = None
    arrivals: Arrivals = "poisson"
    seed: int = 1
    trace: tuple[Arrival, ...] = ()


def default_processes() -> int:
    """Return half of the cores that this process may use, because the server may need the others: 1 to 8."""
    return max(1, min(_MOST_PROCESSES, len(os.sched_getaffinity(0)) // 2))


def parts_of(plan: Plan, step: Step) -> list[Part]:
    """Return the parts of the processes that take part in a step."""
    in_flight = step.concurrency
    number = plan.processes if in_flight is None else min(plan.processes, in_flight)
    shares = [0 if in_flight is None else share(in_flight, number, part) for part in range(number)]
    return [
        Part(
            connections=plan.connections or max(1, -(-shares[part] // _IN_FLIGHT_ON_A_CONNECTION)),
            warmup=plan.warmup,
            duration=plan.duration,
            rows=plan.rows,
            part=part,
            parts=number,
            in_flight=shares[part],
            rate=step.rate or 0.0,
            arrivals=plan.arrivals,
            seed=plan.seed,
            trace=plan.trace if in_flight is None and step.rate is None else (),
        )
        for part in range(number)
    ]


class LoadProcesses:
    """The load processes of a test; a context manager that ends them. Only the main thread may use it."""

    def __init__(self, number: int, target: Target, bodies: Mapping[int, Sequence[bytes]]) -> None:
        # gRPC does not work in forked processes.
        context = multiprocessing.get_context("spawn")
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        # Ctrl-C in a terminal reaches all processes; the command decides what follows.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self._start(context, number, target, bodies)
        finally:
            signal.signal(signal.SIGINT, handler)

    def _start(
        self, context: SpawnContext, number: int, target: Target, bodies: Mapping[int, Sequence[bytes]]
    ) -> None:
        for place in range(number):
            ours, theirs = context.Pipe()
            started = context.Process(
                target=process.main, args=(theirs, target, bodies), name=f"load-{place}", daemon=True
            )
            started.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(started)

    def __enter__(self) -> LoadProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send(None)
            connection.close()
        for started in self._processes:
            started.join(_STOP_SECONDS)
            if started.is_alive():
                started.kill()
                started.join()

    def run(
        self,
        plan: Plan,
        step: Step,
        patience: float,
        statistics: Statistics = lambda: None,
        progress: Progress = lambda step, number, interval: None,
    ) -> StepResult:
        """Run one step; raise LoadError if a load process fails.

        `patience` is how long the last answers may take, in seconds.
        """
        parts = parts_of(plan, step)
        connections = self._connections[: len(parts)]
        for connection, part in zip(connections, parts, strict=True):
            connection.send(part)
        for connection in connections:
            self._receive(connection, time.monotonic() + _PATIENCE_SECONDS)
        begin = time.monotonic() + _HEAD_START_SECONDS
        for connection in connections:
            connection.send(begin)
        # While the load runs, so that both ends of the difference are under it.
        time.sleep(max(0.0, begin + plan.warmup - time.monotonic()))
        before = statistics()
        end = begin + plan.warmup + plan.duration
        totals = StepTotals(step)
        after: ServerTotals | None = None
        counted = False
        for reports in self._reports(connections, end + patience + _PATIENCE_SECONDS):
            interval = totals.add([report.tally for report in reports])
            if interval is not None:
                progress(step, reports[0].interval, interval)
            if not counted and time.monotonic() >= end:
                after, counted = statistics(), True
        return totals.result(difference(before, after))

    def _reports(self, connections: Sequence[Connection], until: float) -> Iterator[list[Report]]:
        """Yield the reports of all processes for each interval, the final ones last."""
        waiting: dict[int, list[Report]] = {}
        left = list(connections)
        while left:
            ready = wait(left, max(0.0, until - time.monotonic()))
            if not ready:
                raise LoadError("a load process does not report; this is a bug")
            for connection in ready:
                assert isinstance(connection, Connection)
                report = self._receive(connection, until)
                if not isinstance(report, Report):
                    raise LoadError(f"a load process sent {report!r}; this is a bug")
                if report.final:
                    left.remove(connection)
                some = waiting.setdefault(report.interval, [])
                some.append(report)
                if len(some) == len(connections):
                    yield waiting.pop(report.interval)

    def _receive(self, connection: Connection, until: float) -> object:
        try:
            if not connection.poll(max(0.0, until - time.monotonic())):
                raise TimeoutError
            received: object = connection.recv()
        except TimeoutError:
            raise LoadError("a load process does not answer; this is a bug") from None
        except (EOFError, OSError):
            place = self._connections.index(connection)
            self._processes[place].join(_STOP_SECONDS)
            status = self._processes[place].exitcode
            raise LoadError(f"load process {place} ended unexpectedly with status {status}") from None
        if isinstance(received, Failed):
            raise LoadError(received.message)
        return received
