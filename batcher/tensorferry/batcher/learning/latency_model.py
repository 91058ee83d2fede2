"""Model of batch time by rows, fitted online to the batches that ran.

Two models predict each batch before it is learned, and the more accurate one is used. The line (decayed least
squares) needs few samples and is right if every row costs the same. The table (isotonic regression: a running mean for
each size, made monotone) follows any shape, above all the staircase of a GPU's tiles. Warm-up runs anchor both, because
a line is undetermined while only one size runs.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_DECAY = 0.98
# A sample is clipped to this factor above or below its prediction ...
_CLIP = 1.3
# ... until this many in a row were clipped on the same side, because then the costs have changed.
_OUTLIER_RUN = 8
# The first samples of a bucket show sooner that it differs from the one that was warmed up.
_NEW, _NEW_OUTLIER_RUN = 16, 1
# A step of a staircase is not an outlier.
_TABLE_CLIP = 1.5
# Weight of each warm-up run relative to a sample, and of all warm-up runs together.
_ANCHOR_WEIGHT, _ANCHORS_WEIGHT = 0.5, 2.0
_DEVIATION_WEIGHT = 0.05
# The table replaces the line if its error is smaller by this factor ...
_TABLE_BETTER = 0.8
# ... and is replaced if it is not better any more and the line is near all of it. While only some sizes run, a line
# through these may be far from the others.
_LINE_BETTER, _LINE_NEAR = 0.95, 2.0
# A warm-up of this many sizes shows whether they lie on a line.
_TABLE_KNOWN = 4
# Each size of the table is a mean over about this many of its last batches.
_MEAN_OF = 16
# The table is fitted again after this many batches, or at once after a batch that took longer than its upper bound: on a
# staircase the next batch may be beyond the same step. The table has at most `_TABLE_SIZES` sizes; others are rounded up.
_TABLE_EVERY = 16
_TABLE_SIZES = 128
# Each fit fades a size's weight by this factor, down to a least weight: an old mean is better than none, but newer means
# of neighbouring sizes outweigh it.
_FADE, _LEAST = 0.98, 0.05
# Timed waits end late by about this many seconds.
_TIMER_SLACK = 50e-6

# Sums of weight, rows, rows², seconds, rows · seconds.
_Sums = tuple[float, float, float, float, float]
_NO_SUMS: _Sums = (0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class LatencyStatistics:
    """The learned model: batch time ≈ `alpha` + `beta` · rows in seconds, and the table by rows.

    `piecewise` says that the table is used, not the line. `deviation` is the mean absolute error of the one in use,
    relative to its prediction.
    """

    observations: int
    clipped: int
    alpha: float
    beta: float
    piecewise: bool
    deviation: float
    table: Mapping[int, float]


class Curve(NamedTuple):
    """Immutable prediction of batch time by rows, in seconds.

    `sizes` are the table's, ascending; `means` are their seconds, ascending too.
    """

    most: int
    alpha: float = 0.0
    beta: float = 0.0
    sizes: Sequence[int] = ()
    means: Sequence[float] = ()
    piecewise: bool = False
    deviation: float = 0.02

    @property
    def known(self) -> bool:
        """Whether anything was learned."""
        return bool(self.sizes)

    def table(self, rows: int) -> float:
        """Return the table's mean, interpolated between sizes."""
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
        """Return the expected time; 0 if nothing is known. For rates."""
        return self.table(rows) if self.piecewise else self.alpha + self.beta * rows

    def upper(self, rows: int) -> float:
        """Return the expected time with a margin; 0 if nothing is known. For feasibility only."""
        return self.mean(rows) * (1 + 2 * self.deviation) + _TIMER_SLACK if self.sizes else 0.0

    def max_rows_within(self, slack: float) -> int:
        """Return the most rows whose `upper` is within the slack; the maximum if nothing is known."""
        sizes, means = self.sizes, self.means
        if not sizes:
            return self.most
        mean = (slack - _TIMER_SLACK) / (1 + 2 * self.deviation)
        alpha, beta, least, most = self.alpha, self.beta, 0, self.most
        if self.piecewise:
            # On the line between the last size within the slack and the next size.
            at = bisect_right(means, mean)
            least = sizes[at - 1] if at else 0
            if at == 0:
                most = 0
            elif at < len(sizes):
                most = sizes[at]
                beta = (means[at] - means[at - 1]) / (most - least)
                alpha = means[at - 1] - beta * least
        rows = int(min(max((mean - alpha) / max(beta, 1e-15), least), most))
        # Correct rounding errors of the inversion.
        while rows and self.upper(rows) > slack:
            rows -= 1
        while rows < self.most and self.upper(rows + 1) <= slack:
            rows += 1
        return rows


class LatencyModel:
    """Online model of batch time by rows; `curve` is its current prediction.

    Not thread-safe: the owner lets one thread at a time learn. Any thread may read `curve`.
    """

    def __init__(self, max_batch_size: int) -> None:
        self._most = max_batch_size
        self._grain = -(-max_batch_size // _TABLE_SIZES)
        self.curve = Curve(max_batch_size)
        # Sums of the warm-up runs, which stay, and of the samples, which fade.
        self._anchors = _NO_SUMS
        self._sums = _NO_SUMS
        # By size: mean seconds, their weight, and the number of observations at its last sample.
        self._seen: dict[int, tuple[float, float, int]] = {}
        self._table_in = _TABLE_EVERY
        self._line_error = self._table_error = 0.02
        self._observations = 0
        self._clipped = 0
        self._outlier_run = 0

    def add_warmup_sample(self, rows: int, seconds: float) -> None:
        """Learn a warm-up run, which never fades."""
        if rows < 1 or not 0 <= seconds < math.inf:
            raise _impossible(rows, seconds)
        w, s1, s2, sy, s1y = self._anchors
        self._anchors = (w + 1.0, s1 + rows, s2 + rows * rows, sy + seconds, s1y + rows * seconds)
        self._learn(rows, seconds, self.curve.piecewise, new_table=True)
        if not self._observations and len(self._seen) >= _TABLE_KNOWN:
            self.curve = self.curve._replace(piecewise=self._line_is_far())

    def observe(self, rows: int, seconds: float) -> None:
        """Learn a batch that ran. A single outlier changes little; a lasting change is followed."""
        if rows < 1 or not 0 <= seconds < math.inf:
            raise _impossible(rows, seconds)
        self._observations += 1
        curve, by_size = self.curve, seconds
        line, table = curve.alpha + curve.beta * rows, curve.table(rows) if curve.sizes else 0.0
        piecewise = curve.piecewise
        expected = table if piecewise else line
        if expected > 0:
            # A model that predicts 0 gets the largest error.
            error = min(abs(seconds / line - 1), 0.5) if line > 0 else 0.5
            self._line_error += _DEVIATION_WEIGHT * (error - self._line_error)
            error = min(abs(seconds / table - 1), 0.5) if table > 0 else 0.5
            self._table_error += _DEVIATION_WEIGHT * (error - self._table_error)
            if not piecewise:
                piecewise = self._table_error < _TABLE_BETTER * self._line_error
            elif self._table_error >= _LINE_BETTER * self._line_error:
                piecewise = self._line_is_far()
            if expected / _CLIP <= seconds <= _CLIP * expected:
                self._outlier_run = 0
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
        # This bound is `curve.upper(rows)`.
        late = seconds > expected * (1 + 2 * curve.deviation) + _TIMER_SLACK
        self._table_in = 0 if late else self._table_in - 1
        new_table = self._table_in <= 0 or self._observations <= _TABLE_EVERY
        self._learn(rows, by_size, piecewise, new_table=new_table)

    def _line_is_far(self) -> bool:
        """Return whether the line is farther from the table than the samples are, on average."""
        curve = self.curve
        apart = [
            abs((curve.alpha + curve.beta * size) / mean - 1)
            for size, mean in zip(curve.sizes, curve.means, strict=True)
            if mean > 0
        ]
        return sum(apart) > _LINE_NEAR * self._table_error * len(apart)

    def _clip(self, rows: int, seconds: float, expected: float) -> float:
        """Return the clipped time of a sample far from its prediction; after a run of them, the time itself."""
        side = 1 if seconds > expected else -1
        self._outlier_run = self._outlier_run + side if self._outlier_run * side > 0 else side
        new = self._observations <= _NEW and self._anchors[0] > 0
        longest = _NEW_OUTLIER_RUN if new else _OUTLIER_RUN
        if abs(self._outlier_run) > longest:
            if abs(self._outlier_run) == longest + 1:
                self._rescale(rows, seconds)
            return seconds
        self._clipped += 1
        return min(max(seconds, expected / _CLIP), _CLIP * expected)

    def _rescale(self, rows: int, seconds: float) -> None:
        """Scale the model to this sample and reduce its weight, because the costs have changed."""
        alpha, beta = _line(self._anchors)
        scale = seconds / max(alpha + beta * rows, 1e-9)
        w, s1, s2, sy, s1y = self._anchors
        self._anchors = (w, s1, s2, sy * scale, s1y * scale)
        w, s1, s2, sy, s1y = self._sums
        self._sums = (0.1 * w, 0.1 * s1, 0.1 * s2, 0.1 * sy, 0.1 * s1y)
        scale = seconds / max(self.curve.table(rows), 1e-9)
        self._seen = {
            size: (mean * scale, 0.1 * weight, at) for size, (mean, weight, at) in self._seen.items()
        }
        self._table_in = 0

    def _learn(self, rows: int, seconds: float, piecewise: bool, *, new_table: bool) -> None:
        """Add a sample to its size, and make the curve; with `new_table`, fit the table again, which takes longer."""
        size = min(-(-rows // self._grain) * self._grain, self._most)
        mean, weight, seen_at = self._seen.get(size, (0.0, 0.0, 0))
        # An old mean, with other sizes run since, says little about the present time.
        weight /= 1 + (self._observations - seen_at) / _MEAN_OF
        weight = min(weight + 1.0, _MEAN_OF)
        mean = mean + (seconds - mean) / weight if weight > 1.0 else seconds
        self._seen[size] = (mean, weight, self._observations)
        anchors = self._anchors
        alpha, beta = _line(self._sums, min(_ANCHOR_WEIGHT, _ANCHORS_WEIGHT / max(anchors[0], 1.0)), anchors)
        sizes, means = self.curve.sizes, self.curve.means
        if new_table:
            sizes, means = self._fit_table(alpha, beta)
        deviation = self._table_error if piecewise else self._line_error
        self.curve = Curve(self._most, alpha, beta, sizes, means, piecewise, deviation)

    def _fit_table(self, alpha: float, beta: float) -> tuple[list[int], list[float]]:
        """Fit the table by isotonic regression: pool neighbouring sizes until times never decrease."""
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

    def statistics(self) -> LatencyStatistics:
        """Return what was learned so far."""
        curve = self.curve
        return LatencyStatistics(
            observations=self._observations,
            clipped=self._clipped,
            alpha=curve.alpha,
            beta=curve.beta,
            piecewise=curve.piecewise,
            deviation=curve.deviation,
            table=dict(zip(curve.sizes, curve.means, strict=True)),
        )


def _line(sums: _Sums, share: float = 0.0, anchors: _Sums = _NO_SUMS) -> tuple[float, float]:
    """Return the least-squares line, fixed part and seconds per row; neither is negative.

    A share of the anchors' sums is added to the samples'.
    """
    a, b, c, d, e = sums
    f, g, h, i, j = anchors
    weight, s1, s2, sy, s1y = a + share * f, b + share * g, c + share * h, d + share * i, e + share * j
    if not weight:
        return 0.0, 0.0
    determinant = weight * s2 - s1 * s1
    if determinant > 1e-9 * weight * s2:
        beta = max(0.0, (weight * s1y - s1 * sy) / determinant)
    else:
        # One size only: take half of the time as fixed, half as per row.
        beta = sy / s1 / 2
    alpha = max(0.0, (sy - beta * s1) / weight)
    return alpha, beta if alpha else s1y / s2


def _impossible(rows: int, seconds: float) -> ValueError:
    return ValueError(
        f"a batch of {rows} rows in {seconds} s: rows must be at least 1, seconds at least 0 and finite"
    )
