"""Waiting for what tells nobody that it has come."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# A bound for waits that end at once unless something is broken; never waited out by a passing test.
PATIENCE = 30.0


def until(look: Callable[[], T], reached: Callable[[T], object] = bool, *, seconds: float = PATIENCE) -> T:
    """Looks until what is found is as it must become; what was found last is in the error."""
    give_up = time.monotonic() + seconds
    while not reached(found := look()):
        assert time.monotonic() < give_up, f"it is still {found!r}"
        # Who only looked again would keep the interpreter from the threads that it waits for.
        time.sleep(0.001)
    return found
