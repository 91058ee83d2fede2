"""Monotonic time, injected so that tests can control it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Protocol

# A client's deadline may be centuries away, which the system's timers refuse. Waking up once an hour costs nothing.
_LONGEST_WAIT = 3600.0


class Clock(Protocol):
    """Monotonic time in seconds, and waiting in it."""

    def now(self) -> float:
        """Return the current time."""

    def wait(self, condition: threading.Condition, until: float) -> None:
        """Wait for a notification of `condition`, whose lock is held, at most until `until` (inf: no limit).

        May return early, so the caller must check its predicate in a loop.
        """


class MonotonicClock:
    """The clock of `time.monotonic`, which gRPC deadlines use, too. Thread-safe."""

    # The function itself, because it is called several times for each request.
    now = staticmethod(time.monotonic)

    def wait(self, condition: threading.Condition, until: float) -> None:
        """Wait on the condition, with a timeout if `until` is finite."""
        if math.isinf(until):
            condition.wait()
        else:
            condition.wait(min(max(0.0, until - time.monotonic()), _LONGEST_WAIT))


def wait_for(
    clock: Clock, condition: threading.Condition, is_over: Callable[[], object], until: float
) -> bool:
    """Wait on a condition, whose lock is held, until `is_over`, at most until `until`; return whether it is over."""
    while not is_over():
        if clock.now() >= until:
            return False
        clock.wait(condition, until)
    return True
