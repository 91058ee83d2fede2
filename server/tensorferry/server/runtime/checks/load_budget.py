"""Time that the checks of a load may take before the model is ready."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

# The time of this many runs of one row, or these seconds if that is longer: a small model takes microseconds.
_ROWS = 10
_LEAST_SECONDS = 1.0


class LoadBudget:
    """The time of about ten runs of one row, and at least `least_seconds`, from its creation. Not thread-safe.

    Before the first call of `row_took`, a row counts as nothing. With inf there is no limit of time. It allows nothing once
    `goes_on` returns false. If it did not allow a run that was needed, it `ran_out`.
    """

    def __init__(
        self,
        least_seconds: float = _LEAST_SECONDS,
        clock: Callable[[], float] = time.perf_counter,
        goes_on: Callable[[], bool] = lambda: True,
    ) -> None:
        self._least = least_seconds
        self._clock = clock
        self._goes_on = goes_on
        self.ran_out = False
        self._began = clock()
        self._row_seconds = 0.0

    def row_took(self, seconds: float) -> None:
        """Note the time of a run of one row. The shortest counts, because the first run is slower."""
        self._row_seconds = min(seconds, self._row_seconds or math.inf)

    def used(self) -> float:
        """Return the seconds since its creation."""
        return self._clock() - self._began

    def allows(self, rows: int, *, needed: bool = True) -> bool:
        """Return whether a run of this many rows is expected to end in time; if it is not `needed`, within `least_seconds`."""
        limit = max(self._least, _ROWS * self._row_seconds) if needed else self._least
        allowed = self._goes_on() and self.used() + rows * self._row_seconds <= limit
        self.ran_out = self.ran_out or (needed and not allowed)
        return allowed
