"""A load test from the side of the command: starts load processes, and adds up their reports."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from tensorferry.client.load import process
from tensorferry.client.load.histogram import Histogram
from tensorferry.client.load.records import Failed, Part, Plan, Tally, Target
from tensorferry.client.load.results import Interval, StepResult, StepTotals
from tensorferry.client.load.server_statistics import ServerTotals, difference
from tensorferry.client.load.steps import Step

_MOST_PROCESSES = 8
# Time from the start message to the start, in which it reaches all processes, and for an answer of
# a load process beyond the time that it needs.
_HEAD_START_SECONDS = 0.05
_PATIENCE_SECONDS = 60.0
_STOP_SECONDS = 5.0

# What a load process adds to an interval after its last report.
_NOTHING = Tally(0.0, Histogram(), 0, Histogram(), {}, 0.0, 0.0)

# Returns the totals of the model; None if the server has none.
Statistics = Callable[[], ServerTotals | None]
# Called with the number of the interval from 0, and the interval of all processes together.
Progress = Callable[[Step, int, Interval], None]


class LoadError(OSError):
    """A load process failed; the message says how."""


def default_processes() -> int:
    """Return half of the cores that this process may use, because the server may need the others: 1 to 8."""
    return max(1, min(_MOST_PROCESSES, len(os.sched_getaffinity(0)) // 2))


def parts_of(plan: Plan, step: Step) -> list[Part]:
    """Return the parts of the processes that take part in a step."""
    parts = min(plan.processes, step.concurrency or plan.processes)
    return [Part(plan, step, part, parts) for part in range(parts)]


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
            for place in range(number):
                ours, theirs = context.Pipe()
                work = (theirs, target, bodies)
                started = context.Process(target=process.main, args=work, name=f"load-{place}", daemon=True)
                started.start()
                theirs.close()
                self._connections.append(ours)
                self._processes.append(started)
        finally:
            signal.signal(signal.SIGINT, handler)

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
        ended: set[Connection] = set()
        for number in itertools.count():
            tallies = []
            for each in connections:
                until = end + patience + _PATIENCE_SECONDS
                tallies.append(_NOTHING if each in ended else self._tally(each, until))
                if not tallies[-1].seconds:
                    ended.add(each)
            interval = totals.add(tallies)
            if not counted and (interval is None or time.monotonic() >= end):
                after, counted = statistics(), True
            if interval is None:
                break
            progress(step, number, interval)
        return totals.result(difference(before, after))

    def _tally(self, connection: Connection, until: float) -> Tally:
        tally = self._receive(connection, until)
        if not isinstance(tally, Tally):
            raise LoadError(f"a load process sent {tally!r}; this is a bug")
        return tally

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
