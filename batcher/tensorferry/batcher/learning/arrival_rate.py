"""Rates of arrivals and their typical time to the deadline, learned from the arrivals."""

from __future__ import annotations

import math

from tensorferry.batcher.policy.load_shedding import ArrivalDemand

# With a larger weight the rate is underestimated more often, and batches become too small to keep up.
_WEIGHT = 1 / 64
# For this many seconds after the last request with a deadline, arrivals are counted.
_COUNTED_SECONDS = 10.0

_INF = math.inf


class _Means:
    """Running means over about the last 64 arrivals of one rank; inf: unknown."""

    __slots__ = ("gap", "last", "least", "patience", "rows")

    def __init__(self) -> None:
        self.last = -_INF
        self.gap = _INF
        self.rows = 1.0
        # The usual and the least time from arrival to deadline, in seconds.
        self.patience = self.least = _INF


class ArrivalRates:
    """Arrivals by rank, over all buckets, since they share the devices. Guarded by the queue's lock.

    Only requests with deadlines need the rates. So arrivals are counted until `counted_until`, a while after the last of
    these.
    """

    __slots__ = ("_ranks", "counted_until")

    def __init__(self, ranks: int) -> None:
        self._ranks = [_Means() for _ in range(ranks)]
        self.counted_until = -_INF

    def arrived(self, rank: int, now: float, rows: int, time_left: float) -> None:
        """Count an arrival of `rows` rows, whose deadline is `time_left` seconds away (inf: none).

        After `counted_until` it need not be called for requests without a deadline.
        """
        means = self._ranks[rank]
        if time_left < _INF:
            if now >= self.counted_until:
                self._ranks = [_Means() for _ in self._ranks]
                means = self._ranks[rank]
            self.counted_until = now + _COUNTED_SECONDS
            usual = means.patience
            if time_left <= usual and time_left < means.least:
                means.least = time_left
            means.patience = usual + _WEIGHT * (time_left - usual) if usual < _INF else time_left
        if rows != means.rows:
            means.rows += _WEIGHT * (rows - means.rows)
        gap = now - means.last
        means.gap = gap if means.gap == _INF else means.gap + _WEIGHT * (gap - means.gap)
        means.last = now

    def least_patience(self, rank: int) -> float:
        """Return the shortest recent time from arrival to deadline, of a rank and those above; inf if unknown.

        Called once a batch. Each call raises it a little, so that an old one is forgotten.
        """
        ranks = self._ranks[: rank + 1]
        for means in ranks:
            means.least *= 1 + _WEIGHT
        return min([means.least for means in ranks])

    def demand(self, rank: int, now: float, workers: float) -> ArrivalDemand:
        """Return one worker's share of the demand of a rank; the rate decreases while nothing arrives."""
        means = self._ranks[rank]
        patience = means.patience if means.patience < _INF else 0.0
        if means.gap == _INF:
            return ArrivalDemand(0.0, patience)
        # As if a request arrived now, because a third of random gaps exceed the mean.
        gap = max(means.gap, means.gap + _WEIGHT * (now - means.last - means.gap), 1e-9)
        return ArrivalDemand(means.rows / gap / workers, patience)
