"""Search by bisection for the highest rate of Poisson arrivals at which the latency meets its bound."""

from __future__ import annotations

# The first rate, and the lowest that is tried, relative to the offline rate.
_FIRST, _TOO_MUCH = 0.85, 1.08
# Factor by which a rate is lowered that met the bound once and fails in a longer run.
_STEP_DOWN = 0.95


class PeakSearch:
    """Rates that met the bound, and rates that did not, updated after each run.

    A failed run counts, even if the machine was disturbed, so the result is rather too low. A
    search without any success has found 0.
    """

    def __init__(self, offline: float) -> None:
        self._met = 0.0
        self._failed = _TOO_MUCH * offline
        self._next = _FIRST * offline

    @property
    def rate(self) -> float:
        """Return the next rate to try."""
        return self._next

    @property
    def best(self) -> float:
        """Return the highest rate that met the bound."""
        return self._met

    def record(self, met: bool) -> None:
        """Record whether `rate` met the bound."""
        if met:
            self._met = self._next
        else:
            self._failed = self._next
        self._next = (self._met + self._failed) / 2


def stepped_down(rate: float) -> float:
    """Return the next rate to confirm after this one failed."""
    return rate * _STEP_DOWN
