"""Choice of the batch sizes that a warm-up runs, so that a staircase is known before the first request.

A GPU's time grows in steps, of its tiles or of captured CUDA graphs: 65 rows may take as long as 96. At powers of two
alone this looks like a line. One row more than each power of two shows the steps, because they end there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

# Gaps narrower than this are not examined.
_NARROW = 4
# Times that differ by less than this factor count as equal.
_LONGER = 1.1
# One row more is a step if it takes at least this share of the gap's increase, and this many times the increase of an
# average row.
_STEP = 0.2
_STEEP = 2
# Bound for noisy times, which may look like steps everywhere.
_MOST_PROBES = 16


def powers_of_two(most: int) -> tuple[int, ...]:
    """Return the batch sizes 1, 2, 4, ... and `most`."""
    return tuple(sorted({min(1 << power, most) for power in range(most.bit_length() + 1)}))


def calibrate(timed: Callable[[int], float], most: int) -> Iterator[tuple[int, float]]:
    """Run batches of up to `most` rows with `timed`, which returns seconds; yield the rows and seconds of each.

    The powers of two and `most` run first, ascending. Then, from the largest gap down, one row more than a size after
    which batches take longer; if that is a step, also the middle of the gap, and so on, up to about 16 such sizes.
    Errors of `timed` are raised.
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
