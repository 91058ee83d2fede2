"""How much arrives, and how patient it is: learned from the arrivals."""

from __future__ import annotations

import math

from tensorferry.batcher.riding import Demand

# With too few the rate is taken for less than it is about as often as for more. Less costs more:
# batches too small to keep up.
_WEIGHT = 1 / 64


class DemandMeter:
    """Running means over about the last 64 arrivals. Guarded by the lock of the queue that owns it."""

    __slots__ = ("_gap", "_last", "_patience", "_rows")

    def __init__(self) -> None:
        self._last = math.nan
        self._gap = math.nan
        self._rows = 1.0
        self._patience = math.nan

    def arrived(self, now: float, rows: int, patience: float) -> None:
        """A request of `rows` rows came, whose deadline is `patience` seconds away (inf for none)."""
        self._rows += _WEIGHT * (rows - self._rows)
        if not math.isnan(self._last):
            gap = now - self._last
            self._gap = gap if math.isnan(self._gap) else self._gap + _WEIGHT * (gap - self._gap)
        self._last = now
        if patience < math.inf:
            known = not math.isnan(self._patience)
            self._patience = self._patience + _WEIGHT * (patience - self._patience) if known else patience

    def demand(self, now: float, workers: int) -> Demand:
        """One worker's share of the demand now; the rate falls as time passes without an arrival."""
        if math.isnan(self._gap):
            return Demand(0.0, 0.0 if math.isnan(self._patience) else self._patience)
        # As if one arrived now, no more: of random arrivals a third leave gaps above the mean.
        gap = max(self._gap, self._gap + _WEIGHT * (now - self._last - self._gap), 1e-9)
        return Demand(self._rows / gap / workers, 0.0 if math.isnan(self._patience) else self._patience)
