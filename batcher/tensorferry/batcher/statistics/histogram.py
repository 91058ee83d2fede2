"""How times are spread: how many fell between fixed bounds, which no model and no load changes."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

# In seconds, of every distribution: from less than a small model takes alone to more than anybody waits.
BOUNDS: tuple[float, ...] = (
    *(0.0001, 0.00025, 0.0005),
    *(0.001, 0.0025, 0.005),
    *(0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0),
    *(10.0, 25.0, 50.0),
)
# The last is of what is above all bounds.
INTERVALS = len(BOUNDS) + 1


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of times in seconds: how many were in each interval, and their `sum`.

    An interval has what is at most its bound in `BOUNDS` and more than the one before; the last what is
    above all.
    """

    counts: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        """How many times there were."""
        return sum(self.counts)


def interval_of(seconds: float) -> int:
    """The number of the interval, from 0."""
    return bisect_left(BOUNDS, seconds)


def spread(ordered: Sequence[float], less: float = 0.0) -> Sequence[tuple[int, int]]:
    """In which intervals these times are, each made `less` by so much, and how many in each.

    There must be one, and they must be sorted: those of a batch are mostly in one interval or two, so that
    only its first and last need be looked up.
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
