"""The two loops of a load process: a fixed number of requests in flight, or requests at given times."""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from tensorferry.client.load.calls import Calls, Failure
from tensorferry.client.load.records import Tally
from tensorferry.client.load.steps import Arrival

Clock = Callable[[], float]

# Requests that an open loop has in flight at most, because each takes some kilobytes.
MOST_IN_FLIGHT = 20_000
# Time after the end in which a late sender still sends.
LATE_SECONDS = 1.0
_NO_ROOM = ("NOT_SENT", f"{MOST_IN_FLIGHT} requests of one load process were in flight")
_TOO_LATE = (
    "NOT_SENT",
    "the load process could not send it before the end: use more --processes or a lower --rate",
)


class Loop:
    """Requests in flight, and a tally of those whose time lies in the measurement, from `begin` until `end`.

    The channels of `calls` take turns. Thread-safe.
    """

    def __init__(
        self, calls: Sequence[Calls], begin: float, end: float, clock: Clock = time.monotonic
    ) -> None:
        self._turns, self._clock = itertools.cycle(calls), clock
        self.begin, self.end = begin, end
        # Guards _in_flight and _tally. No call and no callback while holding it.
        self._lock = threading.Lock()
        self._in_flight = 0
        self._tally = Tally()
        self._none_in_flight = threading.Condition(self._lock)

    def wait(self, seconds: float) -> bool:
        """Wait until all requests were sent and have ended, at most this long; return whether that is so."""
        with self._lock:
            return self._none_in_flight.wait_for(lambda: not self._in_flight, seconds)

    def take(self) -> Tally:
        """Return what ended since the last call."""
        with self._lock:
            taken, self._tally = self._tally, Tally()
        return taken

    def _ended(self, at: float, now: float, latency: float, rows: int, failure: Failure | None) -> None:
        """Count a request that ended now. Its latency or failure counts if the time `at` lies in the measurement."""
        counts = self.begin <= at < self.end
        with self._lock:
            if failure is None and self.begin <= now < self.end:
                self._tally.arrived += 1
                self._tally.rows += rows
            if counts and failure is None:
                self._tally.latencies.append(latency)
            elif counts and failure is not None:
                code, message = failure
                number, first = self._tally.failures.get(code, (0, message))
                self._tally.failures[code] = (number + 1, first)

    def _left(self) -> None:
        with self._lock:
            self._in_flight -= 1
            if not self._in_flight:
                self._none_in_flight.notify_all()


class ClosedLoop(Loop):
    """Callers, each of which sends its next request after the last has ended. Thread-safe.

    A latency is from sending to answer, and counts if the answer lies in the measurement. A failure counts
    also after the measurement, because a server that hangs fails no request before.
    """

    def __init__(
        self,
        calls: Sequence[Calls],
        begin: float,
        end: float,
        bodies: Iterator[bytes],
        rows: int,
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(calls, begin, end, clock)
        self._bodies, self._rows = bodies, rows

    def start(self, in_flight: int) -> None:
        """Send the first requests; a caller ends if no body is left, or the measurement has ended."""
        with self._lock:
            self._in_flight = in_flight
        for _ in range(in_flight):
            self._send(self._clock())

    def _send(self, now: float) -> None:
        body = next(self._bodies, None) if now < self.end else None
        if body is None:
            self._left()
        else:
            next(self._turns).start(body, functools.partial(self._done, now))

    def _done(self, sent: float, failure: Failure | None) -> None:
        now = self._clock()
        at = now if failure is None else min(now, max(sent, self.begin))
        self._ended(at, now, now - sent, self._rows, failure)
        self._send(now)


class OpenLoop(Loop):
    """Requests at given times, whatever becomes of the others.

    A latency is from the intended time to the answer, so that a late sender hides no delay. It
    counts if the intended time lies in the measurement. A request that would be one too many in
    flight, or more than a second behind the end, fails unsent.
    """

    def __init__(
        self,
        calls: Sequence[Calls],
        begin: float,
        end: float,
        bodies: Mapping[int, Sequence[bytes]],
        clock: Clock = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
        most_in_flight: int = MOST_IN_FLIGHT,
    ) -> None:
        super().__init__(calls, begin, end, clock)
        self._bodies = {rows: itertools.cycle(some) for rows, some in bodies.items()}
        self._sleep, self._most = sleep, most_in_flight
        # The sender, which may add others.
        self._in_flight = 1

    def run(self, arrivals: Iterable[Arrival], start: float) -> None:
        """Send the requests that arrive until the end; `start` is time 0 of the arrivals. Call this once."""
        for arrival in arrivals:
            intended = start + arrival.at
            if intended >= self.end:
                break
            while (now := self._clock()) < intended:
                self._sleep(intended - now)
            with self._lock:
                if intended >= self.begin:
                    self._tally.lags.append(now - intended)
                failure = _TOO_LATE if now > self.end + LATE_SECONDS else None
                if self._in_flight > self._most:
                    failure = _NO_ROOM
                self._in_flight += failure is None
            if failure is None:
                done = functools.partial(self._done, intended, arrival.rows)
                next(self._turns).start(next(self._bodies[arrival.rows]), done)
            else:
                self._ended(intended, now, 0.0, 0, failure)
        self._left()

    def _done(self, intended: float, rows: int, failure: Failure | None) -> None:
        now = self._clock()
        self._ended(intended, now, now - intended, rows, failure)
        self._left()
