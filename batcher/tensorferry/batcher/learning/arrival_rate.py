"""Rate of arrivals and their typical time to the deadline, learned from the arrivals."""

from __future__ import annotations

import math

from tensorferry.batcher.policy.load_shedding import ArrivalDemand

# With a larger weight the rate is underestimated more often, and batches become too small to keep up.
_WEIGHT = 1 / 64

_INF = math.inf


class ArrivalRateMeter:
    """Running means over about the last 64 arrivals. Guarded by the queue's lock."""

    __slots__ = ("_gap", "_last", "_least", "_patience", "_rows")

    def __init__(self) -> None:
        # inf: unknown.
        self._last = -math.inf
        self._gap = math.inf
        self._rows = 1.0
        self._patience = math.inf
        self._least = math.inf

    def arrived(self, now: float, rows: int, patience: float) -> None:
        """Note a request whose deadline is `patience` seconds away (inf: none)."""
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
        """Return the shortest recent time from arrival to deadline; inf if unknown. Called once a batch.

        Each call raises it a little, so that an old one is forgotten.
        """
        self._least *= 1 + _WEIGHT
        return self._least

    def demand(self, now: float, workers: float) -> ArrivalDemand:
        """Return one worker's share of the demand; the rate decreases while nothing arrives."""
        patience = self._patience if self._patience < _INF else 0.0
        if self._gap == _INF:
            return ArrivalDemand(0.0, patience)
        # As if a request arrived now, because a third of random gaps exceed the mean.
        gap = max(self._gap, self._gap + _WEIGHT * (now - self._last - self._gap), 1e-9)
        return ArrivalDemand(self._rows / gap / workers, patience)
