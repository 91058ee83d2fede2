"""The highest rate at which LoadGen's Server scenario meets its bound, by bisection."""

from __future__ import annotations

# The first rate that is tried, and the lowest that is taken to fail untried, ÷ the offline rate.
_FIRST, _TOO_MUCH = 0.85, 1.08
# A rate that met the bound once and fails when it is run for longer is lowered by so much.
_STEP_DOWN = 0.95


class PeakSearch:
    """Between rates that met the bound and rates that did not; told of one run after the other.

    A run that fails is believed, though the machine may have been disturbed: what is found is
    rather too low. A search that has met the bound nowhere has found 0.
    """

    def __init__(self, offline: float) -> None:
        self._met = 0.0
        self._failed = _TOO_MUCH * offline
        self._next = _FIRST * offline
        self.tried: list[tuple[float, bool]] = []

    @property
    def rate(self) -> float:
        """The rate to try next."""
        return self._next

    @property
    def best(self) -> float:
        """The highest that met the bound."""
        return self._met

    def tell(self, met: bool) -> None:
        """Whether `rate` met the bound."""
        self.tried.append((self._next, met))
        if met:
            self._met = self._next
        else:
            self._failed = self._next
        self._next = (self._met + self._failed) / 2


def stepped_down(rate: float) -> float:
    """The rate to confirm after this one could not be."""
    return rate * _STEP_DOWN
