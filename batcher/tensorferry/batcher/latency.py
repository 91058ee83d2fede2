"""How long a batch of n rows takes: learned on line from what batches took.

A running median per size, for sizes that are powers of two, over a decayed least-squares line;
between the sizes that were seen it interpolates, so a staircase (a GPU's tiles) is learned as
one. Warm-up runs anchor the line, which one repeated size would leave undetermined.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

_DECAY = 0.98
_MEDIAN_OF = 32
# Fewer than so many say less of a size than the line does.
_LEAST_SEEN = 16
# An observation counts as at most so much more, or less, than what was predicted ...
_CLIP = 1.3
# ... until so many in a row were clipped on the same side: then things have really changed.
_SIDE_RUN = 8
_ANCHOR_WEIGHT = 0.5
_DEVIATION_WEIGHT = 0.05
# Timers wake up late by about so much.
_TIMER_SLACK = 50e-6


@dataclass(frozen=True, slots=True)
class LatencyStatistics:
    """What was learned: batch time ≈ `alpha` + `beta` · rows in seconds, and the medians by rows.

    `deviation` is the mean absolute deviation from the prediction, as a share of it.
    """

    observations: int
    clipped: int
    alpha: float
    beta: float
    deviation: float
    frozen: bool
    table: Mapping[int, float]


class LatencyModel:
    """The time of a batch by its rows, in seconds. Not thread-safe: its owner's lock guards it."""

    def __init__(self, max_batch_size: int) -> None:
        self._most = max_batch_size
        self._sums = [0.0] * 5  # of weight, rows, rows², seconds, rows · seconds, without the anchors
        self._anchors: list[tuple[int, float]] = []
        self._seen: dict[int, deque[float]] = {}
        self._deviation = 0.02
        self._observations = 0
        self._clipped = 0
        self._side_run = 0
        self._frozen = False
        self._line = (0.0, 0.0)
        self._rows: list[int] = []
        self._means: list[float] = []

    @property
    def known(self) -> bool:
        """Whether there is anything to predict from."""
        return bool(self._anchors or self._observations)

    def anchor(self, rows: int, seconds: float) -> None:
        """A warm-up run: half an observation that never fades."""
        _check(rows, seconds)
        self._anchors.append((rows, seconds))
        self._refit()

    def observe(self, rows: int, seconds: float) -> None:
        """A batch that ran. A single slow one changes little, a lasting change is followed."""
        _check(rows, seconds)
        if self._frozen:
            return
        self._observations += 1
        if self.known and (expected := self.mean(rows)) > 0:
            self._deviation += _DEVIATION_WEIGHT * (min(abs(seconds / expected - 1), 0.5) - self._deviation)
            seconds = self._clip(seconds, expected)
        for index, term in enumerate((1.0, rows, rows * rows, seconds, rows * seconds)):
            self._sums[index] = self._sums[index] * _DECAY + term
        # The next size up: what is predicted for it covers every smaller batch.
        size = min(1 << (rows - 1).bit_length(), self._most)
        if rows == size:
            self._seen.setdefault(size, deque(maxlen=_MEDIAN_OF)).append(seconds)
        self._refit()

    def _clip(self, seconds: float, expected: float) -> float:
        side = (seconds > _CLIP * expected) - (seconds < expected / _CLIP)
        if side == 0:
            self._side_run = 0
            return seconds
        self._side_run = self._side_run + side if self._side_run * side > 0 else side
        if abs(self._side_run) > _SIDE_RUN:
            if abs(self._side_run) == _SIDE_RUN + 1:
                # What was learned before describes another device.
                self._seen.clear()
                self._anchors = [(r, s * seconds / expected) for r, s in self._anchors]
                self._sums = [term * 0.1 for term in self._sums]
            return seconds
        self._clipped += 1
        return min(max(seconds, expected / _CLIP), _CLIP * expected)

    def _refit(self) -> None:
        weight, s1, s2, sy, s1y = self._sums
        for rows, seconds in self._anchors:
            weight += _ANCHOR_WEIGHT
            s1 += _ANCHOR_WEIGHT * rows
            s2 += _ANCHOR_WEIGHT * rows * rows
            sy += _ANCHOR_WEIGHT * seconds
            s1y += _ANCHOR_WEIGHT * rows * seconds
        determinant = weight * s2 - s1 * s1
        if determinant > 1e-9 * weight * s2:
            beta = max(0.0, (weight * s1y - s1 * sy) / determinant)
        else:
            # One size only: half fixed, half by the row, until another is seen.
            beta = sy / max(s1, 1e-9) / 2
        alpha = max(0.0, (sy - beta * s1) / weight)
        if alpha == 0.0:
            beta = s1y / s2
        self._line = (alpha, beta)
        # The table: the line, moved onto the medians where there are enough of them.
        self._rows, self._means = [], []
        size, highest = 1, 0.0
        while True:
            seen = self._seen.get(size, ())
            mean = median(seen) if len(seen) >= _LEAST_SEEN else alpha + beta * size
            highest = max(highest, mean)
            self._rows.append(size)
            self._means.append(highest)
            if size >= self._most:
                return
            size = min(2 * size, self._most)

    def mean(self, rows: int) -> float:
        """The expected time; 0 when nothing is known. For rates."""
        if not self._rows:
            return 0.0
        at = bisect_left(self._rows, rows)
        if at == len(self._rows):
            return self._means[-1] + self._line[1] * (rows - self._rows[-1])
        if self._rows[at] == rows or at == 0:
            return self._means[at]
        low, high = self._rows[at - 1], self._rows[at]
        share = (rows - low) / (high - low)
        return self._means[at - 1] + share * (self._means[at] - self._means[at - 1])

    def upper(self, rows: int) -> float:
        """The expected time with a margin; 0 when nothing is known. For feasibility only."""
        mean = self.mean(rows)
        return mean * (1 + 2 * self._deviation) + _TIMER_SLACK if mean else 0.0

    def fit(self, slack: float) -> int:
        """The most rows whose `upper` is within the slack; the maximum when nothing is known."""
        if not self.known or self.upper(self._most) <= slack:
            return self._most
        low, high = 0, self._most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.upper(middle) <= slack else (low, middle)
        return low

    def freeze(self) -> None:
        """Learns no more."""
        self._frozen = True

    def thaw(self) -> None:
        """Learns again."""
        self._frozen = False

    def statistics(self) -> LatencyStatistics:
        """What was learned so far."""
        return LatencyStatistics(
            observations=self._observations,
            clipped=self._clipped,
            alpha=self._line[0],
            beta=self._line[1],
            deviation=self._deviation,
            frozen=self._frozen,
            table=dict(zip(self._rows, self._means, strict=True)),
        )


def _check(rows: int, seconds: float) -> None:
    if rows < 1 or not 0 <= seconds < math.inf:
        raise ValueError(
            f"a batch of {rows} rows in {seconds} s: rows must be at least 1, seconds at least 0 and finite"
        )
