"""Batch costs, their noise, and the line through observed costs that peers use."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

Noise = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of a batch: `fixed + per_row * rows`, times the bucket's scale.

    A `step` above 1 rounds the rows up to its multiples, like a GPU's tiles. `by_rows` has measured seconds of some sizes,
    ascending from 1 row, which replace all that: other sizes lie on the lines between them.
    """

    fixed: float
    per_row: float
    step: int = 1
    scales: tuple[float, ...] = (1.0,)
    by_rows: tuple[tuple[int, float], ...] = ()

    def __call__(self, rows: int, key: int = 0) -> float:
        """Return the batch's seconds, without noise."""
        for (low, below), (high, above) in pairwise(self.by_rows):
            if rows <= high:
                return (below + (rows - low) / (high - low) * (above - below)) * self.scales[key]
        rounded = -(-rows // self.step) * self.step
        return (self.fixed + self.per_row * rounded) * self.scales[key]


def silent() -> float:
    """Return the factor without noise."""
    return 1.0


def noise(seed: int, *, sigma: float = 0.03, stalls: float = 0.002, stall: float = 2.0) -> Noise:
    """Return a source of factors on batch times: lognormal with `sigma`; a share of `stalls` is `stall` times as long."""
    draw = random.Random(seed)

    def factor() -> float:
        spread = math.exp(draw.gauss(0, sigma))
        return spread * stall if draw.random() < stalls else spread

    return factor


class Line:
    """A decayed least-squares line through batch times, anchored by warm-up runs.

    The warm-up keeps the fit regular when every batch has the same size. Outliers are clipped,
    unless many follow each other, because then the device has changed.
    """

    DECAY = 0.98
    ANCHOR_WEIGHT = 0.5
    CLIP = 1.3
    CLIPS_BELIEVED = 8
    PAD_SECONDS = 50e-6

    def __init__(self) -> None:
        # Weighted sums of 1, rows, rows², seconds, rows * seconds.
        self._anchors = [0.0] * 5
        self._sums = [0.0] * 5
        self._clips = 0
        self._deviation = 0.02
        self.fixed = self.per_row = 0.0

    def anchor(self, rows: int, seconds: float) -> None:
        """Add a warm-up run."""
        for index, term in enumerate(_terms(rows, seconds)):
            self._anchors[index] += self.ANCHOR_WEIGHT * term
        self._fit()

    def observe(self, rows: int, seconds: float) -> None:
        """Add a batch that ran."""
        expected = self.mean(rows)
        error = abs(seconds - expected) / expected
        self._deviation += 0.05 * (min(error, 0.5) - self._deviation)
        self._clips = self._clips + 1 if seconds > self.CLIP * expected else 0
        if self._clips < self.CLIPS_BELIEVED:
            seconds = min(seconds, self.CLIP * expected)
        for index, term in enumerate(_terms(rows, seconds)):
            self._sums[index] = self.DECAY * self._sums[index] + term
        self._fit()

    def _fit(self) -> None:
        ones, rows, squares, seconds, products = (
            a + b for a, b in zip(self._anchors, self._sums, strict=True)
        )
        spread = ones * squares - rows * rows
        if spread > 0:
            self.per_row = max(1e-9, (ones * products - rows * seconds) / spread)
            self.fixed = max(0.0, (seconds - self.per_row * rows) / ones)

    def mean(self, rows: int) -> float:
        """Return the expected seconds of a batch."""
        return self.fixed + self.per_row * rows

    def fits(self, seconds: float) -> int:
        """Return the largest batch that ends within that time; 0 or less for none."""
        rows = ((seconds - self.PAD_SECONDS) / (1 + 2 * self._deviation) - self.fixed) / self.per_row
        return math.floor(min(rows, 1e9)) if seconds > 0 else 0


def _terms(rows: int, seconds: float) -> tuple[float, float, float, float, float]:
    return 1.0, rows, rows * rows, seconds, rows * seconds
