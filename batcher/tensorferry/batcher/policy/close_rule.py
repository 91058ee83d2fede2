"""When a batch leaves: pure functions of the queue and the time.

The rule is late-binding and work-conserving: `decide` is asked when the device can start a
batch, and closes one whenever a request waits, unless `max_queue_delay` gives a window. The
window runs from a request's arrival, so what a request has already waited counts.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from tensorferry.batcher.policy.protocols import BucketView, QueuedRequest
from tensorferry.batcher.request import CloseReason
from tensorferry.batcher.settings import Limits

# For what is done for each batch: to look a member up costs more.
_FULL, _IDLE = CloseReason.FULL, CloseReason.IDLE


class Close(NamedTuple):
    """Form a batch from this bucket now, of at most so many rows, which the class `lead` leads."""

    key: Hashable
    reason: CloseReason
    rows: int
    lead: int = 0


# Of the order in which buckets' classes leave; smaller goes first: has credit, class, due, arrival.
_LAST = (True, math.inf, math.inf, math.inf)


class Wait(NamedTuple):
    """Nothing leaves before `until` (inf: before something arrives)."""

    until: float


def decide(
    buckets: Mapping[Hashable, BucketView],
    now: float,
    limits: Limits,
    draining: bool,
    credits: Sequence[float] = (0.0,),
) -> Close | Wait:
    """Which bucket's batch leaves now, or how long nothing does.

    Among the classes that have something in the buckets that may leave, the highest with credit
    leads, and of its buckets the one that is due first; so neither class nor bucket starves
    behind busier ones. A window ends early when a deadline would be missed by its end.
    """
    until = math.inf
    chosen: Close | None = None
    chosen_order = _LAST
    for key, bucket in buckets.items():
        reason, rows = _closes(bucket, now, limits, draining)
        if reason is None:
            until = min(until, bucket.oldest_arrival + limits.max_queue_delay, bucket.latest_start)
            continue
        if len(buckets) == 1 == len(bucket.class_queues):
            # The usual case: there is nothing to choose from.
            return Close(key, reason, rows)
        for rank, lane in enumerate(bucket.class_queues):
            if not lane.rows:
                continue
            order = (credits[rank] < 1, rank, lane.serve_by, bucket.oldest_arrival)
            if order < chosen_order:
                chosen, chosen_order = Close(key, reason, rows, rank), order
    return chosen if chosen is not None else Wait(until)


def _closes(bucket: BucketView, now: float, limits: Limits, draining: bool) -> tuple[CloseReason | None, int]:
    """Why the bucket's batch may leave now, if it may, and the rows that it then has at most."""
    most, delay = limits.max_batch_size, limits.max_queue_delay
    if not delay and not limits.preferred:
        # The usual case.
        if limits.merges:
            return (_IDLE if bucket.rows < most else _FULL), most
        return _FULL, 1
    window_over = delay > 0 and now >= min(bucket.oldest_arrival + delay, bucket.latest_start)
    if limits.preferred and not window_over:
        rows = preferred_rows(_in_order(bucket), limits)
        if rows:
            return CloseReason.PREFERRED, rows
    if bucket.rows >= most:
        return CloseReason.FULL, most
    if delay == 0:
        return CloseReason.IDLE, most
    if draining:
        return CloseReason.DRAIN, most
    return (CloseReason.WINDOW, most) if window_over else (None, 0)


def _in_order(bucket: BucketView) -> Iterator[QueuedRequest]:
    for lane in bucket.class_queues:
        yield from lane.with_deadline
        yield from lane.without_deadline


def preferred_rows(requests: Iterable[QueuedRequest], limits: Limits) -> int:
    """The rows of the batch that leaves before its window is over, 0 for none.

    Triton's rule (`preferred_batch_size` in its model configuration): the largest preferred size
    that requests in their order add up to; and when they pass the largest preferred size without
    having hit any, those before.
    """
    best = rows = 0
    for request in requests:
        if rows + request.rows_counted > limits.preferred[-1] and not best and rows:
            return rows
        if rows + request.rows_counted > limits.max_batch_size and rows:
            break
        rows += request.rows_counted
        if rows in limits.preferred:
            best = rows
    # Beyond the largest preferred size nothing is to be waited for.
    return best or (rows if rows >= limits.preferred[-1] else 0)
