"""Latency histogram with a bounded error: buckets that grow by one percent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

# Lower bound of the first bucket, upper bound of the last, in seconds, and the ratio of a bucket's bounds.
LEAST_SECONDS, MOST_SECONDS, GROWTH = 1e-6, 1e5, 1.01
_BUCKETS = math.ceil(math.log(MOST_SECONDS / LEAST_SECONDS) / math.log(GROWTH))


@dataclass(slots=True)
class Histogram:
    """Latencies in seconds. A percentile is at most 0.5 % from the exact one; mean, least and most are exact.

    Latencies outside 1 µs to 100,000 s are counted in the first or the last bucket. Not thread-safe.
    """

    counts: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(_BUCKETS, np.int64))
    total: float = 0.0
    least: float = math.inf
    most: float = 0.0

    def add(self, seconds: Sequence[float]) -> None:
        """Count latencies."""
        if not seconds:
            return
        values = np.array(seconds)
        scaled = np.log(np.maximum(values, LEAST_SECONDS) / LEAST_SECONDS) / math.log(GROWTH)
        buckets = np.minimum(scaled.astype(np.int64), _BUCKETS - 1)
        self.counts += np.bincount(buckets, minlength=_BUCKETS)
        self.total += float(values.sum())
        self.least = min(self.least, float(values.min()))
        self.most = max(self.most, float(values.max()))

    @property
    def count(self) -> int:
        """The number of latencies."""
        return int(self.counts.sum())

    @property
    def mean(self) -> float | None:
        """The mean; None without latencies."""
        return self.total / self.count if self.count else None

    def percentile(self, share: float) -> float | None:
        """Return the latency that this share of all does not exceed; None without latencies."""
        count = self.count
        if not count:
            return None
        rank = max(1, math.ceil(share * count))
        if rank == count:
            return self.most
        bucket = int(np.searchsorted(np.cumsum(self.counts), rank))
        # The geometric mean of the bucket's bounds has the smallest relative error.
        middle = float(LEAST_SECONDS * GROWTH ** (bucket + 0.5))
        return min(self.most, max(self.least, middle))

    def sparse(self) -> dict[int, int]:
        """Return the counts of the buckets that have any."""
        return {int(bucket): int(self.counts[bucket]) for bucket in np.flatnonzero(self.counts)}
