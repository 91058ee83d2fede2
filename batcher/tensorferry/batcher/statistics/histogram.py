"""Histograms of times with fixed bounds, equal for every model and load."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

# Upper bounds of the intervals in seconds: from less than a small model takes to more than any caller waits.
BOUNDS: tuple[float, ...] = (
    *(0.0001, 0.00025, 0.0005),
    *(0.001, 0.0025, 0.005),
    *(0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0),
    *(10.0, 25.0, 50.0),
)
# The last interval has the times above all bounds.
INTERVALS = len(BOUNDS) + 1


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of times, in seconds, in each interval, and the `sum` of the times.

    An interval has the times up to its bound in `BOUNDS`, and above the bound before; the last has those above
    all bounds.
    """

    counts: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        """The number of times."""
        return sum(self.counts)


def interval_of(seconds: float) -> int:
    """The number of the interval of a time, from 0."""
    return bisect_left(BOUNDS, seconds)


def spread(ordered: Sequence[float], less: float = 0.0) -> Sequence[tuple[int, int]]:
    """Count times per interval, each reduced by `less`; return pairs of interval and count.

    `ordered` is sorted and not empty. The times of a batch are mostly in one or two intervals, so often only the
    first and the last are looked up.
    """
    first = bisect_left(BOUNDS, ordered[0] - less)
    count = len(ordered)
    if count == 1:
        return ((first, 1),)
    last = bisect_left(BOUNDS, ordered[-1] - less)
    if first == last:
        return ((first, count),)
    found, before = [], 0
    for interval in range(first, last):
        upto = bisect_right(ordered, BOUNDS[interval] + less)
        found.append((interval, upto - before))
        before = upto
    found.append((last, count - before))
    return found
