"""A device as the queue sees it: what is in flight on it, and when it will be free."""

from __future__ import annotations

import math
import threading
from collections import deque

# A timed wait wakes up late by a little: better that the next batch is ready too early.
_GUARD = 300e-6


class Device:
    """Guarded by the queue's lock, on which `ready` is built.

    Without pipelining a batch is in flight until its requests are completed, so the device
    is idle whenever its worker asks for the next. With it, one batch may be prepared or
    completed by one worker while the device runs another's: two in flight at most.
    """

    __slots__ = ("_free_at", "_in_flight", "preparation", "ready", "unanswered", "waiting")

    def __init__(self, lock: threading.Lock) -> None:
        # A batch may leave for this device. Waited for by its workers, `waiting` of them.
        self.ready = threading.Condition(lock)
        self.waiting = 0
        # Batches that left and whose requests are not all completed.
        self.unanswered = 0
        # How long the last batch was expected to be prepared by the host, in seconds.
        self.preparation = 0.0
        # How long each batch in flight should keep the device, in seconds, the running one first.
        self._in_flight: deque[float] = deque()
        self._free_at = -math.inf

    @property
    def idle(self) -> bool:
        """Whether no batch is in flight."""
        return not self._in_flight

    def free_at(self, now: float) -> float:
        """When it should have run what is in flight."""
        return max(now, self._free_at) if self._in_flight else now

    def starts(self, now: float) -> float:
        """The time from which on a batch that leaves now is on its way without waiting."""
        return max(now, self.free_at(now) - self.preparation)

    def turn(self, now: float) -> float:
        """When the next batch should leave, to be prepared just in time."""
        return now if self.idle else self.free_at(now) - self.preparation - _GUARD

    def left(self, now: float, seconds: float) -> None:
        """A batch left that keeps the device for so many seconds."""
        self._free_at = max(self.free_at(now), now + self.preparation) + seconds
        self._in_flight.append(seconds)
        self.unanswered += 1

    def released(self, now: float) -> None:
        """The device has run its batch."""
        self._in_flight.popleft()
        self._free_at = now + sum(self._in_flight)
