"""The clairvoyant optimum: the most requests that any schedule answers in time, knowing the whole trace.

For one device, one bucket, one timeout, and known batch times that grow with the rows. Then
deadlines are in order of arrival, and one of the best schedules takes requests in that order,
each batch consecutive ones: a batch that skips a request between two others could take that one
and drop the older instead. So a table is enough: for the first i requests with d of them dropped,
the earliest time at which the device is free. It is filled row by row.

A row needs few columns. A device that is free before the newest request arrived is as good as one
that is free earlier, so beyond the first such column another drop gains nothing. Dropping all
requests that arrive before the device is free, at most those of one timeout, is at least as good
as as many more drops at once.
"""

from __future__ import annotations

import bisect

import numpy as np
import numpy.typing as npt
from costs import Cost

# Tolerance of comparisons, so that a batch that ends exactly at a deadline counts.
SLACK = 1e-9
# The table is shifted by this many columns once they are no longer needed.
MOVE = 512


def fewest_misses(
    arrivals: list[float], timeout: float, cost: Cost, max_batch_size: int, limit: int | None = None
) -> int | None:
    """Return how many requests the best schedule misses; None if more than `limit`."""
    count = len(arrivals)
    # More drops than this beyond the fewest never help.
    width = 1 + max(
        bisect.bisect_left(arrivals, arrival + timeout + SLACK) - index
        for index, arrival in enumerate(arrivals)
    )
    came = np.array(arrivals)
    seconds = np.array([cost(rows) for rows in range(1, max_batch_size + 1)])
    # free[i % height, d - base]: when the device is free after the first i requests with d drops; inf
    # for never, and if more drops do not help. `ends` has each row's end of the other columns.
    height = max_batch_size + 1
    free = np.full((height, width + MOVE + 1), np.inf)
    free[0, 0] = 0.0
    ends = np.zeros(height, dtype=np.int64)
    ends[0] = 1
    base = fewest = 0
    for i in range(1, count + 1):
        last = arrivals[i - 1]
        start = fewest - base
        end = min(int(ends.max()) + 1 - base, start + width)
        # The newest is dropped: one column on. Or it is in a batch of the newest 1, 2, ...,
        # as many as are in time if the device is free: longer ones end later and are due earlier.
        best = np.full(end - start, np.inf)
        best[1:] = free[(i - 1) % height, start : end - 1]
        rows = min(max_batch_size, i)
        due = came[i - rows : i][::-1] + (timeout + SLACK)
        rows = int(np.count_nonzero(last + seconds[:rows] <= due))
        if rows:
            over = np.maximum(_before(free[:, start:end], i % height, rows), last) + seconds[:rows, None]
            over[over > due[:rows, None]] = np.inf
            np.minimum(best, over.min(axis=0), out=best)
        row = i % height
        free[row] = np.inf
        free[row, start:end] = best
        enough = np.flatnonzero(best <= last)
        ends[row] = fewest + (int(enough[0]) + 1 if len(enough) else len(best))
        free[row, ends[row] - base :] = np.inf
        if best[0] == np.inf:
            # No schedule gets past here with so few drops.
            fewest += 1
            if limit is not None and fewest > limit:
                return None
            if fewest - base > MOVE:
                free[:, :-MOVE] = free[:, MOVE:]
                free[:, -MOVE:] = np.inf
                base += MOVE
    return fewest


def _before(free: npt.NDArray[np.float64], row: int, rows: int) -> npt.NDArray[np.float64]:
    """Return the `rows` rows before `row` in the ring, the nearest first."""
    if rows <= row:
        return free[row - rows : row][::-1]
    return np.concatenate((free[:row][::-1], free[row - rows :][::-1]))
