"""Choice of a batch size from measured times: the best one, a full batch, and the largest one within a bound of latency."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from tensorferry.batcher.learning.paying_rows import full_batch_rows, powers_of_two
from tensorferry.server.onnx.measuring.batch_times import BatchTime

# A larger batch is not better unless it gains more than this share of rows per second, because it delays each request.
_ENOUGH = 0.95
BEST_RULE = "the fewest rows with at least 95 % of the most rows/s"

# One row of a request that waits for the batch before it takes two batch times.
_BATCHES_WAITED = 2


def best_size(times: Sequence[BatchTime]) -> BatchTime | None:
    """Return the smallest size with nearly the most rows per second; None if nothing was measured."""
    most = max((time.rows_per_second for time in times), default=0.0)
    return next((time for time in times if time.rows_per_second >= _ENOUGH * most), None)


def full_batch(times: Sequence[BatchTime], max_batch_size: int) -> int | None:
    """Return the rows of a full batch, as the server chooses them from such times; None if fewer than two sizes were measured."""
    sizes = powers_of_two(max_batch_size)
    measured = {time.rows: time.seconds / time.rows for time in times if time.rows in sizes}
    return (full_batch_rows(measured) or max_batch_size) if len(measured) > 1 else None


def within(times: Sequence[BatchTime], seconds: float) -> tuple[BatchTime | None, BatchTime | None]:
    """Return the largest measured batches within a bound of latency; None if no size is.

    The first takes no longer than the bound. A request gets the second in time even if it waits for a batch of the same
    size that has just started. Sizes ascend; those above one that is too slow do not count.
    """
    return _largest(times, seconds), _largest(times, seconds / _BATCHES_WAITED)


def _largest(times: Sequence[BatchTime], seconds: float) -> BatchTime | None:
    fast = list(takewhile(lambda time: time.seconds <= seconds, times))
    return fast[-1] if fast else None
