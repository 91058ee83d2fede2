"""How long a batch of n rows takes: learned on line from what batches took.

Two models predict each batch before it is learned from, and the one that has been closer is
believed. The line (decayed least squares) needs little data and is right where each row costs
the same. The table (isotonic regression: a running mean at each size that ran, made to grow
with the rows) follows any shape, a staircase (a GPU's tiles) above all. Warm-up runs anchor
both: one repeated size would leave a line undetermined.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_DECAY = 0.98
# An observation counts as at most so much more, or less, than what was predicted ...
_CLIP = 1.3
# ... until so many in a row were clipped on the same side: then things have really changed.
_SIDE_RUN = 8
# The first batches of a bucket tell sooner that it is not like the one that was warmed up.
_NEW, _NEW_SIDE_RUN = 16, 1
# A step of a staircase is no outlier.
_TABLE_CLIP = 1.5
# Each warm-up run is so much of an observation, and all together are no more than so many.
_ANCHOR_WEIGHT, _ANCHORS_WEIGHT = 0.5, 2.0
_DEVIATION_WEIGHT = 0.05
# The table replaces the line when its error is so much smaller ...
_TABLE_BETTER = 0.8
# ... and gives way when it is no more, and the line is near all of it: where only some sizes run
# for a while, a line through these may be far off the others.
_LINE_BETTER, _LINE_NEAR = 0.95, 2.0
# Of so many sizes the warm-up tells whether they are on a line.
_TABLE_KNOWN = 4
# Each size of the table is a mean over about so many of its latest batches.
_MEAN_OF = 16
# The table is made anew after so many batches, or at once when one took longer than was allowed for: on a staircase the
# next may be beyond the same step. It has at most so many sizes, the others rounded up.
_TABLE_EVERY = 16
_TABLE_SIZES = 128
# By how much a size fades each time, and no further: an old mean is better than none, and yields to
# its neighbours' newer ones.
_FADE, _LEAST = 0.98, 0.05
# Timers wake up late by about so much.
_TIMER_SLACK = 50e-6

# Of weight, rows, rows², seconds, rows · seconds.
_Sums = tuple[float, float, float, float, float]
_NO_SUMS: _Sums = (0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class LatencyStatistics:
    """What was learned: batch time ≈ `alpha` + `beta` · rows in seconds, and the table by rows.

    `stairs` tells that the table is believed, not the line; `deviation` is the mean absolute
    deviation from what is believed, as a share of it.
    """

    observations: int
    clipped: int
    alpha: float
    beta: float
    stairs: bool
    deviation: float
    table: Mapping[int, float]


class Curve(NamedTuple):
    """The time of a batch by its rows, in seconds, as it is known at some time: never changed, only replaced.

    `sizes` are those of the table, ascending, and `means` their seconds, which grow.
    """

    most: int
    alpha: float = 0.0
    beta: float = 0.0
    sizes: Sequence[int] = ()
    means: Sequence[float] = ()
    stairs: bool = False
    deviation: float = 0.02

    @property
    def known(self) -> bool:
        """Whether there is anything to predict from."""
        return bool(self.sizes)

    def table(self, rows: int) -> float:
        """The table's mean: between two sizes as much as the share of the way."""
        sizes, means = self.sizes, self.means
        at = bisect_left(sizes, rows)
        if at == len(sizes):
            return means[-1] + self.beta * (rows - sizes[-1])
        high = sizes[at]
        if high == rows:
            return means[at]
        low, below = sizes[at - 1], means[at - 1]
        return below + (rows - low) / (high - low) * (means[at] - below)

    def mean(self, rows: int) -> float:
        """The expected time; 0 when nothing is known. For rates."""
        return self.table(rows) if self.stairs else self.alpha + self.beta * rows

    def upper(self, rows: int) -> float:
        """The expected time with a margin; 0 when nothing is known. For feasibility only."""
        return self.mean(rows) * (1 + 2 * self.deviation) + _TIMER_SLACK if self.sizes else 0.0

    def fit(self, slack: float) -> int:
        """The most rows whose `upper` is within the slack; the maximum when nothing is known."""
        sizes, means = self.sizes, self.means
        if not sizes:
            return self.most
        mean = (slack - _TIMER_SLACK) / (1 + 2 * self.deviation)
        alpha, beta, least, most = self.alpha, self.beta, 0, self.most
        if self.stairs:
            # On the line between the last size that is not longer and the next.
            at = bisect_right(means, mean)
            least = sizes[at - 1] if at else 0
            if at == 0:
                most = 0
            elif at < len(sizes):
                most = sizes[at]
                beta = (means[at] - means[at - 1]) / (most - least)
                alpha = means[at - 1] - beta * least
        rows = int(min(max((mean - alpha) / max(beta, 1e-15), least), most))
        # What was computed backwards may be off by a rounding error.
        while rows and self.upper(rows) > slack:
            rows -= 1
        while rows < self.most and self.upper(rows + 1) <= slack:
            rows += 1
        return rows


class LatencyModel:
    """Learns the time of a batch by its rows. `curve` is what it knows.

    Not thread-safe: who owns it sees to it that one thread at a time learns. Any may read `curve`.
    """

    def __init__(self, max_batch_size: int) -> None:
        self._most = max_batch_size
        self._grain = -(-max_batch_size // _TABLE_SIZES)
        self.curve = Curve(max_batch_size)
        # Of the anchors, which stay, and of what ran, which fades.
        self._anchors = _NO_SUMS
        self._sums = _NO_SUMS
        # Mean seconds, their weight and after how many observations the last was, by size.
        self._seen: dict[int, tuple[float, float, int]] = {}
        self._table_in = _TABLE_EVERY
        self._stairs = False
        self._line_error = self._table_error = 0.02
        self._observations = 0
        self._clipped = 0
        self._side_run = 0

    def anchor(self, rows: int, seconds: float) -> None:
        """A warm-up run: what it teaches never fades."""
        _check(rows, seconds)
        terms = (1.0, rows, rows * rows, seconds, rows * seconds)
        self._anchors = _plus(self._anchors, 1.0, terms)
        self._learn_size(rows, seconds)
        self._redraw(new_table=True)
        if not self._observations and len(self._seen) >= _TABLE_KNOWN:
            self._stairs = self._line_is_far()
            self._redraw(new_table=False)

    def observe(self, rows: int, seconds: float) -> None:
        """A batch that ran. A single slow one changes little, a lasting change is followed."""
        _check(rows, seconds)
        self._observations += 1
        by_size = seconds
        curve = self.curve
        line, table = curve.alpha + curve.beta * rows, curve.table(rows) if curve.sizes else 0.0
        expected = table if self._stairs else line
        if expected > 0:
            self._judge(seconds, line, table)
            if expected / _CLIP <= seconds <= _CLIP * expected:
                self._side_run = 0
            elif (clipped := self._clip(rows, seconds, expected)) != seconds:
                by_size = min(max(seconds, table / _TABLE_CLIP), _TABLE_CLIP * table)
                seconds = clipped
        w, s1, s2, sy, s1y = self._sums
        self._sums = (
            w * _DECAY + 1.0,
            s1 * _DECAY + rows,
            s2 * _DECAY + rows * rows,
            sy * _DECAY + seconds,
            s1y * _DECAY + rows * seconds,
        )
        self._learn_size(rows, by_size)
        self._table_in = 0 if seconds > curve.upper(rows) else self._table_in - 1
        self._redraw(new_table=self._table_in <= 0 or self._observations <= _TABLE_EVERY)

    def _judge(self, seconds: float, line: float, table: float) -> None:
        """Counts how far both models were off, and decides which is believed."""
        # Where a model knows no better than 0 it is as wrong as can be.
        off = min(abs(seconds / line - 1), 0.5) if line > 0 else 0.5
        self._line_error += _DEVIATION_WEIGHT * (off - self._line_error)
        off = min(abs(seconds / table - 1), 0.5) if table > 0 else 0.5
        self._table_error += _DEVIATION_WEIGHT * (off - self._table_error)
        if not self._stairs:
            self._stairs = self._table_error < _TABLE_BETTER * self._line_error
        elif self._table_error >= _LINE_BETTER * self._line_error:
            self._stairs = self._line_is_far()

    def _line_is_far(self) -> bool:
        """Whether the line is off the table by much more, all in all, than what ran is."""
        curve = self.curve
        apart = [
            abs((curve.alpha + curve.beta * size) / mean - 1)
            for size, mean in zip(curve.sizes, curve.means, strict=True)
            if mean > 0
        ]
        return sum(apart) > _LINE_NEAR * self._table_error * len(apart)

    def _clip(self, rows: int, seconds: float, expected: float) -> float:
        """What one is taken for that is far off what was expected."""
        side = 1 if seconds > expected else -1
        self._side_run = self._side_run + side if self._side_run * side > 0 else side
        new = self._observations <= _NEW and self._anchors[0] > 0
        longest = _NEW_SIDE_RUN if new else _SIDE_RUN
        if abs(self._side_run) > longest:
            if abs(self._side_run) == longest + 1:
                self._rescale(rows, seconds)
            return seconds
        self._clipped += 1
        return min(max(seconds, expected / _CLIP), _CLIP * expected)

    def _rescale(self, rows: int, seconds: float) -> None:
        """What was learned describes another device: of the same shape at best, and not for sure."""
        alpha, beta = _line(self._anchors)
        scale = seconds / max(alpha + beta * rows, 1e-9)
        w, s1, s2, sy, s1y = self._anchors
        self._anchors = (w, s1, s2, sy * scale, s1y * scale)
        self._sums = _plus(_NO_SUMS, 0.1, self._sums)
        scale = seconds / max(self.curve.table(rows), 1e-9)
        self._seen = {
            size: (mean * scale, 0.1 * weight, at) for size, (mean, weight, at) in self._seen.items()
        }
        self._table_in = 0

    def _learn_size(self, rows: int, seconds: float) -> None:
        size = min(-(-rows // self._grain) * self._grain, self._most)
        mean, weight, seen_at = self._seen.get(size, (0.0, 0.0, 0))
        # What a size took long ago, others having run since, says little of what it takes now.
        weight /= 1 + (self._observations - seen_at) / _MEAN_OF
        weight = min(weight + 1.0, _MEAN_OF)
        mean = mean + (seconds - mean) / weight if weight > 1.0 else seconds
        self._seen[size] = (mean, weight, self._observations)

    def _redraw(self, *, new_table: bool) -> None:
        """Makes the curve of what was learned; the table only if asked to, which takes longer."""
        anchors = self._anchors
        weight = min(_ANCHOR_WEIGHT, _ANCHORS_WEIGHT / max(anchors[0], 1.0))
        alpha, beta = _line(_plus(self._sums, weight, anchors))
        sizes, means = self.curve.sizes, self.curve.means
        if new_table:
            sizes, means = self._fit_table(alpha, beta)
        deviation = self._table_error if self._stairs else self._line_error
        self.curve = Curve(self._most, alpha, beta, sizes, means, self._stairs, deviation)

    def _fit_table(self, alpha: float, beta: float) -> tuple[list[int], list[float]]:
        """Pools neighbouring sizes until more rows never take less: isotonic regression."""
        self._table_in = _TABLE_EVERY
        self._seen = {
            size: (mean, max(weight * _FADE, _LEAST), at) for size, (mean, weight, at) in self._seen.items()
        }
        ends = {size: (alpha + beta * size, _LEAST, 0) for size in (1, self._most)}
        known = ends | self._seen
        sizes = sorted(known)
        pools: list[tuple[float, float, int]] = []
        for size in sizes:
            mean, weight, _ = known[size]
            count = 1
            while pools and pools[-1][0] >= mean:
                above, other, more = pools.pop()
                mean = (mean * weight + above * other) / (weight + other)
                weight += other
                count += more
            pools.append((mean, weight, count))
        return sizes, [mean for mean, _, count in pools for _ in range(count)]

    @property
    def known(self) -> bool:
        """As `Curve.known`."""
        return self.curve.known

    def mean(self, rows: int) -> float:
        """As `Curve.mean`."""
        return self.curve.mean(rows)

    def upper(self, rows: int) -> float:
        """As `Curve.upper`."""
        return self.curve.upper(rows)

    def fit(self, slack: float) -> int:
        """As `Curve.fit`."""
        return self.curve.fit(slack)

    def statistics(self) -> LatencyStatistics:
        """What was learned so far."""
        curve = self.curve
        return LatencyStatistics(
            observations=self._observations,
            clipped=self._clipped,
            alpha=curve.alpha,
            beta=curve.beta,
            stairs=curve.stairs,
            deviation=curve.deviation,
            table=dict(zip(curve.sizes, curve.means, strict=True)),
        )


def _line(sums: _Sums) -> tuple[float, float]:
    """The least-squares line: what is fixed, and what each row costs; neither negative."""
    weight, s1, s2, sy, s1y = sums
    if not weight:
        return 0.0, 0.0
    determinant = weight * s2 - s1 * s1
    if determinant > 1e-9 * weight * s2:
        beta = max(0.0, (weight * s1y - s1 * sy) / determinant)
    else:
        # One size only: half fixed, half by the row, until another is seen.
        beta = sy / s1 / 2
    alpha = max(0.0, (sy - beta * s1) / weight)
    return alpha, beta if alpha else s1y / s2


def _plus(sums: _Sums, weight: float, terms: _Sums) -> _Sums:
    a, b, c, d, e = sums
    f, g, h, i, j = terms
    return a + weight * f, b + weight * g, c + weight * h, d + weight * i, e + weight * j


def _check(rows: int, seconds: float) -> None:
    if rows < 1 or not 0 <= seconds < math.inf:
        raise ValueError(
            f"a batch of {rows} rows in {seconds} s: rows must be at least 1, seconds at least 0 and finite"
        )
