"""Comparison of two load tests, with a caution where a difference is within the spread of the intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tensorferry.client.load.results import StepResult
from tensorferry.client.load.steps import Step


@dataclass(frozen=True, slots=True)
class Difference:
    """One figure of one step in two tests. `unit` is "/s", "s" or "rows".

    `within_spread` is None if the figure has no intervals, or too few.
    """

    step: Step
    figure: str
    unit: str
    other: float
    this: float
    within_spread: bool | None

    @property
    def change(self) -> float | None:
        """The relative change, 0.1 for 10 % more than the other; None if the other is 0."""
        return self.this / self.other - 1 if self.other else None


# Name and unit of a figure, its value in a step, and its name in an interval, if it has one there.
_Figure = tuple[str, str, Callable[[StepResult], float | None], str]
_FIGURES: tuple[_Figure, ...] = (
    ("requests per second", "/s", lambda step: step.requests_per_second, "requests_per_second"),
    ("p50", "s", lambda step: step.latencies.percentile(0.5), "p50_seconds"),
    ("p95", "s", lambda step: step.latencies.percentile(0.95), ""),
    ("p99", "s", lambda step: step.latencies.percentile(0.99), "p99_seconds"),
    ("failed", "", lambda step: float(step.failed), ""),
    ("queue", "s", lambda step: step.server.queue_seconds if step.server else None, ""),
    ("compute", "s", lambda step: step.server.compute_seconds if step.server else None, ""),
    ("batch", "rows", lambda step: step.server.mean_batch_rows if step.server else None, ""),
)


def compare(this: Sequence[StepResult], other: Sequence[StepResult]) -> list[Difference]:
    """Return the differences of all figures that both tests have, for the steps that both have."""
    found = []
    others = {step.step: step for step in other}
    for mine, theirs in ((step, others[step.step]) for step in this if step.step in others):
        for figure, unit, value, in_interval in _FIGURES:
            now, before = value(mine), value(theirs)
            if now is None or before is None or (now == before == 0):
                continue
            noise = _spread(mine, theirs, in_interval) if in_interval else None
            within = None if noise is None else abs(now - before) <= noise
            found.append(Difference(mine.step, figure, unit, before, now, within))
    return found


def _spread(this: StepResult, other: StepResult, figure: str) -> float | None:
    """Return the spread of a figure between the intervals of two tests; None with less than two in one.

    It is the standard deviation of a difference between one interval of each.
    """
    variances = []
    for step in (this, other):
        values = [found for one in step.intervals if (found := getattr(one, figure)) is not None]
        if len(values) < 2:
            return None
        variances.append(statistics.variance(values))
    return math.sqrt(sum(variances))
