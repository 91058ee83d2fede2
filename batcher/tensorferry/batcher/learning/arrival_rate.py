"""How much arrives, and how patient it is: learned from the arrivals."""

from __future__ import annotations

import math

from tensorferry.batcher.policy.batch_forming import Demand

# With too few the rate is taken for less than it is about as often as for more. Less costs more:
# batches too small to keep up.
_WEIGHT = 1 / 64

_INF = math.inf


class DemandMeter:
    """Running means over about the last 64 arrivals. Guarded by the lock of the queue that owns it."""

    __slots__ = ("_gap", "_last", "_least", "_patience", "_rows")

    def __init__(self) -> None:
        # inf: not known yet.
        self._last = -math.inf
        self._gap = math.inf
        self._rows = 1.0
        self._patience = math.inf
        self._least = math.inf

    def arrived(self, now: float, rows: int, patience: float) -> None:
        """A request of `rows` rows came, whose deadline is `patience` seconds away (inf for none)."""
        if rows != self._rows:
            self._rows += _WEIGHT * (rows - self._rows)
        gap = now - self._last
        self._gap = gap if self._gap == _INF else self._gap + _WEIGHT * (gap - self._gap)
        self._last = now
        if patience < _INF:
            usual = self._patience
            if patience <= usual and patience < self._least:
                self._least = patience
            self._patience = usual + _WEIGHT * (patience - usual) if usual < _INF else patience

    def least_patience(self) -> float:
        """How long the least patient have from arrival to deadline, inf when that is not known. To be asked once a batch.

        When none such has come for long it is forgotten.
        """
        self._least *= 1 + _WEIGHT
        return self._least

    def demand(self, now: float, workers: float) -> Demand:
        """One worker's share of the demand now; the rate falls as time passes without an arrival."""
        patience = self._patience if self._patience < _INF else 0.0
        if self._gap == _INF:
            return Demand(0.0, patience)
        # As if one arrived now, no more: of random arrivals a third leave gaps above the mean.
        gap = max(self._gap, self._gap + _WEIGHT * (now - self._last - self._gap), 1e-9)
        return Demand(self._rows / gap / workers, patience)
