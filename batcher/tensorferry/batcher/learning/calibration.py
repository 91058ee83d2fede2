"""Which sizes of batch a warm-up runs, so that a staircase is known before the first request.

A GPU's time grows in steps, of its tiles or of the batch sizes that CUDA graphs were captured for: 65 rows may take as
long as 96. The powers of two alone look the same as if each row took its time. One row more than each of them tells:
there such steps end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

# Gaps between two known sizes that are closer teach little.
_NARROW = 4
# What takes less than so many times as long is taken for the same.
_LONGER = 1.1
# One row more is a step where it takes at least this share of what the whole gap does, and more than so many times the
# part of a row of it.
_STEP = 0.2
_STEEP = 2
# Where times are all noise, everything may look like steps.
_MOST_PROBES = 16


def powers_of_two(most: int) -> tuple[int, ...]:
    """The batch sizes 1, 2, 4, ... and `most`."""
    return tuple(sorted({min(1 << power, most) for power in range(most.bit_length() + 1)}))


def calibrate(timed: Callable[[int], float], most: int) -> Iterator[tuple[int, float]]:
    """Runs batches of up to `most` rows by `timed`, which returns the seconds; yields rows and seconds of each.

    First the powers of two and `most`, ascending; then, from the largest down, one row more than those after which
    batches take longer, and where that is a step also the middle of what lies beyond, and so on, until all of it is
    known or some 16 such sizes ran. What `timed` raises ends it.
    """
    took: dict[int, float] = {}

    def run(rows: int) -> Iterator[tuple[int, float]]:
        if rows not in took:
            took[rows] = timed(rows)
            yield rows, took[rows]

    sizes = powers_of_two(most)
    for rows in sizes:
        yield from run(rows)
    gaps = list(pairwise(sizes))
    while gaps and len(took) < len(sizes) + _MOST_PROBES:
        low, high = gaps.pop()
        if high - low < _NARROW or took[high] <= _LONGER * took[low]:
            continue
        edge, middle = low + 1, (low + high) // 2
        yield from run(edge)
        share = (took[edge] - took[low]) / (took[high] - took[low])
        if share >= max(_STEP, _STEEP / (high - low)) and took[high] >= _LONGER * took[edge]:
            yield from run(middle)
            gaps += [(low, middle), (middle, high)]
