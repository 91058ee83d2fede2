"""Memory that a large batch took is given back: ONNX Runtime's arena keeps it otherwise."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

# A run that shrinks the arena costs the memory of the next one again: seen as 1.7 times one run of 4,096 rows,
# and not at all for runs below a millisecond.
_SECONDS = 60.0


class ArenaShrinkage:
    """The options of each run: every minute a run shrinks the arena when it ends, the others leave it.

    Runs may be at the same time; two of them may then both shrink it, which is harmless. Thread-safe.
    """

    def __init__(self, usual: Any, shrinking: Any, now: Callable[[], float] = time.monotonic) -> None:
        self._usual = usual
        self._shrinking = shrinking
        self._now = now
        self._next = now() + _SECONDS

    def options(self) -> Any:
        """The options of the run that begins now."""
        now = self._now()
        if now < self._next:
            return self._usual
        self._next = now + _SECONDS
        return self._shrinking
