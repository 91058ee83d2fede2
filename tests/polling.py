"""Waiting for conditions that have no event."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# Bound for waits that end at once unless something is broken; a passing test never waits it out.
PATIENCE = 30.0


def until(look: Callable[[], T], reached: Callable[[T], object] = bool, *, seconds: float = PATIENCE) -> T:
    """Poll until the value satisfies the condition; the error shows the last value."""
    give_up = time.monotonic() + seconds
    while not reached(found := look()):
        assert time.monotonic() < give_up, f"it is still {found!r}"
        # A busy loop would keep the interpreter from the threads that it waits for.
        time.sleep(0.001)
    return found
