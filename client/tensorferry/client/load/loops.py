"""The two loops of a load process: a fixed number of requests in flight, or requests at given times."""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tensorferry.client.load.calls import Calls, Failure
from tensorferry.client.load.steps import Arrival

Clock = Callable[[], float]

# Requests that an open loop has in flight at most, because each takes some kilobytes.
MOST_IN_FLIGHT = 20_000
_NOT_SENT = ("NOT_SENT", f"{MOST_IN_FLIGHT} requests of one load process were in flight")


@dataclass(slots=True)
class Recorded:
    """What ended in one interval: latencies and lags in seconds, and failures by code."""

    latencies: list[float] = field(default_factory=list)
    rows: int = 0
    # By how much requests were sent after the intended time; only in an open loop.
    lags: list[float] = field(default_factory=list)
    # Number and first message.
    failures: dict[str, tuple[int, str]] = field(default_factory=dict)


class Recorder:
    """Records of requests whose time lies in the measurement, from `begin` until `end`. Thread-safe."""

    def __init__(self, begin: float, end: float) -> None:
        self._begin, self._end = begin, end
        # Guards _recorded. No call and no callback while holding it.
        self._lock = threading.Lock()
        self._recorded = Recorded()

    def answered(self, at: float, latency: float, rows: int) -> None:
        """Record an answer."""
        if self._begin <= at < self._end:
            with self._lock:
                self._recorded.latencies.append(latency)
                self._recorded.rows += rows

    def failed(self, at: float, failure: Failure) -> None:
        """Record a failure."""
        if self._begin <= at < self._end:
            code, message = failure
            with self._lock:
                number, first = self._recorded.failures.get(code, (0, message))
                self._recorded.failures[code] = (number + 1, first)

    def sent(self, at: float, lag: float) -> None:
        """Record by how much a request was sent late."""
        if self._begin <= at < self._end:
            with self._lock:
                self._recorded.lags.append(lag)

    def take(self) -> Recorded:
        """Return what was recorded since the last call."""
        with self._lock:
            taken, self._recorded = self._recorded, Recorded()
        return taken


class ClosedLoop:
    """Callers, each of which sends its next request after the last has ended. Thread-safe.

    A latency is from sending to answer, and counts if the answer lies in the measurement.
    """

    def __init__(
        self,
        calls: Calls,
        bodies: Sequence[bytes],
        rows: int,
        recorder: Recorder,
        clock: Clock = time.monotonic,
    ) -> None:
        self._calls, self._recorder, self._clock = calls, recorder, clock
        self._bodies = itertools.cycle(bodies)
        self._rows = rows
        # Guards _stopping and _in_flight. No call while holding it.
        self._lock = threading.Lock()
        self._stopping = False
        self._in_flight = 0
        self._none_in_flight = threading.Condition(self._lock)

    def start(self, in_flight: int) -> None:
        """Send the first requests."""
        with self._lock:
            self._in_flight = in_flight
        for _ in range(in_flight):
            self._send()

    def stop(self, patience: float) -> None:
        """Send no more requests, and wait for the answers, at most `patience` seconds."""
        with self._lock:
            self._stopping = True
            self._none_in_flight.wait_for(lambda: not self._in_flight, patience)

    def _send(self) -> None:
        self._calls.start(next(self._bodies), functools.partial(self._done, self._clock()))

    def _done(self, sent: float, failure: Failure | None) -> None:
        now = self._clock()
        if failure is None:
            self._recorder.answered(now, now - sent, self._rows)
        else:
            self._recorder.failed(now, failure)
        if self._stopping:
            with self._lock:
                self._in_flight -= 1
                self._none_in_flight.notify_all()
        else:
            self._send()


class OpenLoop:
    """Requests at given times, whatever becomes of the others. One thread may call `run`.

    A latency is from the intended time to the answer, so that a late sender hides no delay. It
    counts if the intended time lies in the measurement. A request that would be one too many in
    flight fails unsent.
    """

    def __init__(
        self,
        calls: Calls,
        bodies: Mapping[int, Sequence[bytes]],
        recorder: Recorder,
        clock: Clock = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
        most_in_flight: int = MOST_IN_FLIGHT,
    ) -> None:
        self._most = most_in_flight
        self._calls, self._recorder, self._clock, self._sleep = calls, recorder, clock, sleep
        self._bodies = {rows: itertools.cycle(some) for rows, some in bodies.items()}
        # Guards _in_flight. No call while holding it.
        self._lock = threading.Lock()
        self._in_flight = 0
        self._none_in_flight = threading.Condition(self._lock)

    def run(self, arrivals: Iterable[Arrival], begin: float, end: float) -> None:
        """Send the requests that arrive between two times of the clock; `begin` is time 0 of the arrivals."""
        for arrival in arrivals:
            intended = begin + arrival.at
            if intended >= end:
                return
            while (now := self._clock()) < intended:
                self._sleep(intended - now)
            self._recorder.sent(intended, now - intended)
            with self._lock:
                sendable = self._in_flight < self._most
                self._in_flight += sendable
            if not sendable:
                self._recorder.failed(intended, _NOT_SENT)
                continue
            self._calls.start(
                next(self._bodies[arrival.rows]), functools.partial(self._done, intended, arrival.rows)
            )

    def stop(self, patience: float) -> None:
        """Wait for the answers, at most `patience` seconds."""
        with self._lock:
            self._none_in_flight.wait_for(lambda: not self._in_flight, patience)

    def _done(self, intended: float, rows: int, failure: Failure | None) -> None:
        if failure is None:
            self._recorder.answered(intended, self._clock() - intended, rows)
        else:
            self._recorder.failed(intended, failure)
        with self._lock:
            self._in_flight -= 1
            if not self._in_flight:
                self._none_in_flight.notify_all()
