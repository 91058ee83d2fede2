"""The two loops of a load process: a fixed number of requests in flight, or requests at given times."""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

    def ended(self, at: float, latency: float, rows: int, failure: Failure | None) -> None:
        """Record an answer, or a failure."""
        if not self._begin <= at < self._end:
            return
        with self._lock:
            if failure is None:
                self._recorded.latencies.append(latency)
                self._recorded.rows += rows
            else:
                code, message = failure
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


class _Loop:
    """Requests in flight, and their ends. Thread-safe."""

    def __init__(self, calls: Calls, recorder: Recorder, clock: Clock) -> None:
        self._calls, self._recorder, self._clock = calls, recorder, clock
        # Guards _in_flight. No call while holding it.
        self._lock = threading.Lock()
        self._in_flight = 0
        self._none_in_flight = threading.Condition(self._lock)

    def wait(self, seconds: float) -> bool:
        """Wait until no request is in flight, at most this long; return whether that is so."""
        with self._lock:
            return self._none_in_flight.wait_for(lambda: not self._in_flight, seconds)

    def _left(self) -> None:
        with self._lock:
            self._in_flight -= 1
            if not self._in_flight:
                self._none_in_flight.notify_all()


class ClosedLoop(_Loop):
    """Callers, each of which sends its next request after the last has ended. Thread-safe.

    `bodies` are the requests, in their order; a caller that finds none left ends. A latency is from sending to answer, and counts if the answer lies in the measurement.
    """

    def __init__(
        self,
        calls: Calls,
        bodies: Iterator[bytes],
        rows: int,
        recorder: Recorder,
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(calls, recorder, clock)
        self._bodies, self._rows = bodies, rows
        self._stopping = False

    def start(self, in_flight: int) -> None:
        """Send the first requests."""
        with self._lock:
            self._in_flight = in_flight
        for _ in range(in_flight):
            self._send()

    def stop(self) -> None:
        """Send no more requests."""
        self._stopping = True

    def _send(self) -> None:
        body = None if self._stopping else next(self._bodies, None)
        if body is None:
            self._left()
        else:
            self._calls.start(body, functools.partial(self._done, self._clock()))

    def _done(self, sent: float, failure: Failure | None) -> None:
        now = self._clock()
        self._recorder.ended(now, now - sent, self._rows, failure)
        self._send()


class OpenLoop(_Loop):
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
        super().__init__(calls, recorder, clock)
        self._bodies = {rows: itertools.cycle(some) for rows, some in bodies.items()}
        self._sleep, self._most = sleep, most_in_flight

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
            if sendable:
                done = functools.partial(self._done, intended, arrival.rows)
                self._calls.start(next(self._bodies[arrival.rows]), done)
            else:
                self._recorder.ended(intended, 0.0, 0, _NOT_SENT)

    def _done(self, intended: float, rows: int, failure: Failure | None) -> None:
        self._recorder.ended(intended, self._clock() - intended, rows, failure)
        self._left()
