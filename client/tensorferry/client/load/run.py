"""A load test from the side of the command: starts load processes, and adds up their tallies."""

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
from tensorferry.client.load.records import LoadError, Plan, Tally, Target
from tensorferry.client.load.results import Interval, StepResult
from tensorferry.client.load.server_statistics import Totals, difference
from tensorferry.client.load.steps import Step

_MOST_PROCESSES = 8
# Time from the start message to the start, in which it reaches all processes, and for an answer of
# a load process beyond the time that it needs.
_HEAD_START_SECONDS = 0.05
_PATIENCE_SECONDS = 60.0
_STOP_SECONDS = 5.0

# Returns the totals of the model; None if the server has none.
Statistics = Callable[[], Totals | None]
# Called with the number of the interval from 0, and the interval of all processes together.
Progress = Callable[[Step, int, Interval], None]


def default_processes() -> int:
    """Return half of the cores that this process may use, because the server may need the others: 1 to 8."""
    return max(1, min(_MOST_PROCESSES, len(os.sched_getaffinity(0)) // 2))


class LoadProcesses:
    """The load processes of a test; a context manager that ends them. Only the main thread may use it.

    `steps` are all that will be run, or need as many processes.
    """

    def __init__(
        self,
        plan: Plan,
        steps: Sequence[Step],
        target: Target,
        bodies: Mapping[int, Sequence[bytes]],
        statistics: Statistics = lambda: None,
        progress: Progress = lambda step, number, interval: None,
    ) -> None:
        self._plan, self._timeout = plan, target.timeout
        self._statistics, self._progress = statistics, progress
        # gRPC does not work in forked processes.
        context = multiprocessing.get_context("spawn")
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        # Ctrl-C in a terminal reaches all processes; the command decides what follows.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            for place in range(max(len(plan.parts(step)) for step in steps)):
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
            _send(connection, None)
            connection.close()
        for started in self._processes:
            started.join(_STOP_SECONDS)
            if started.is_alive():
                started.kill()
                started.join()

    def run(self, step: Step) -> StepResult:
        """Run one step; raise LoadError if a load process fails."""
        plan, parts = self._plan, self._plan.parts(step)
        connections = self._connections[: len(parts)]
        for connection, part in zip(connections, parts, strict=True):
            _send(connection, part)
        for connection in connections:
            self._receive(connection, time.monotonic())
        begin = time.monotonic() + _HEAD_START_SECONDS
        for connection in connections:
            _send(connection, begin)
        # While the load runs, so that both ends of the difference are under it.
        time.sleep(max(0.0, begin + plan.warmup - time.monotonic()))
        before, after = self._statistics(), None
        end = begin + plan.warmup + plan.duration
        result, counted = StepResult(step), False
        ended: set[Connection] = set()
        for number in itertools.count():
            tallies = []
            for each in connections:
                # A load process adds nothing after its last tally.
                tallies.append(Tally() if each in ended else self._receive(each, end + self._timeout))
                if not tallies[-1].seconds:
                    ended.add(each)
            interval = result.add(tallies)
            if not counted and (interval is None or time.monotonic() >= end):
                after, counted = self._statistics(), True
            if interval is None:
                break
            self._progress(step, number, interval)
        result.server = difference(before, after)
        return result

    def _receive(self, connection: Connection, at: float) -> Any:
        """Return what a load process sends at a time of the clock, or within a while after it."""
        try:
            if not connection.poll(max(0.0, at + _PATIENCE_SECONDS - time.monotonic())):
                raise TimeoutError
            received = connection.recv()
        except TimeoutError:
            raise LoadError("a load process does not answer; this is a bug") from None
        except (EOFError, OSError):
            place = self._connections.index(connection)
            self._processes[place].join(_STOP_SECONDS)
            status = self._processes[place].exitcode
            raise LoadError(f"load process {place} ended unexpectedly with status {status}") from None
        if isinstance(received, LoadError):
            raise received
        return received


def _send(connection: Connection, message: object) -> None:
    """Send to a load process; if that has ended, `_receive` says so."""
    with contextlib.suppress(OSError):
        connection.send(message)
