"""The time that a batcher lives by, injected so that tests can hold it in their hands."""

from __future__ import annotations

import math
import threading
import time
from typing import Protocol

# A client's deadline may be centuries away, which the system's timers refuse. To wake up once
# an hour for it costs nothing.
_LONGEST_WAIT = 3600.0


class Clock(Protocol):
    """Monotonic time in seconds, and waiting in it."""

    def now(self) -> float:
        """The time now."""

    def wait(self, condition: threading.Condition, until: float) -> None:
        """Waits for a notification of `condition`, whose lock is held, at most to `until` (inf: no limit).

        May return early: the caller re-checks its predicate in a loop.
        """


class MonotonicClock:
    """`time.monotonic`: what grpc deadlines and every batcher use outside tests. Thread-safe."""

    # Seconds. The function itself: it is asked several times for each request.
    now = staticmethod(time.monotonic)

    def wait(self, condition: threading.Condition, until: float) -> None:
        """Waits on the condition itself, with a timeout when `until` is finite."""
        if math.isinf(until):
            condition.wait()
        else:
            condition.wait(min(max(0.0, until - time.monotonic()), _LONGEST_WAIT))
