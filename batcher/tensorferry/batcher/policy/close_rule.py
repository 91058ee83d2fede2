"""Close rule: pure functions that decide when a batch is closed.

The rule is late-binding and work-conserving. `decide` is called when the device can start a batch, and closes one
whenever a request is queued, unless `max_queue_delay` gives a window. The window runs from a request's arrival, so the
time that it has already waited counts.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from tensorferry.batcher.policy.protocols import BucketView
from tensorferry.batcher.request import CloseReason, Request
from tensorferry.batcher.settings import BatcherSettings

# Globals, because looking up an enum's member costs time for each batch.
_FULL, _IDLE = CloseReason.FULL, CloseReason.IDLE


class Close(NamedTuple):
    """Close a batch of at most `rows` rows from this bucket now; `leading_class` comes first in it."""

    key: Hashable
    reason: CloseReason
    rows: int
    leading_class: int = 0


# Sorts after every other order: has no credit, rank, time due, arrival.
_LAST = (True, math.inf, math.inf, math.inf)


class Wait(NamedTuple):
    """Close nothing before `until` (inf: before something arrives)."""

    until: float


def decide(
    buckets: Mapping[Hashable, BucketView],
    now: float,
    settings: BatcherSettings,
    draining: bool,
    credits: Sequence[float] = (0.0,),
) -> Close | Wait:
    """Return the bucket whose batch is closed now, or how long to wait.

    Among the classes with requests in buckets that may be closed, the highest with credit leads. Of its buckets the one
    that is due first is chosen. So no class and no bucket starves behind busier ones. A window ends early if a deadline
    would be missed at its end.
    """
    until = math.inf
    chosen: Close | None = None
    chosen_order = _LAST
    for key, bucket in buckets.items():
        if not settings.max_queue_delay and not settings.preferred_batch_sizes:
            # Without a window.
            reason: CloseReason | None = _IDLE if settings.merge and bucket.rows < bucket.full_rows else _FULL
            rows = settings.batch_rows if settings.merge else 1
        else:
            reason, rows = _closes(bucket, now, settings, draining)
        if reason is None:
            until = min(until, bucket.oldest_arrival + settings.max_queue_delay, bucket.latest_start)
            continue
        if len(buckets) == 1 == len(bucket.class_queues):
            # Fast path: there is nothing to choose from.
            return Close(key, reason, rows)
        for rank, queue in enumerate(bucket.class_queues):
            if not queue.rows:
                continue
            order = (credits[rank] < 1, rank, queue.serve_by, bucket.oldest_arrival)
            if order < chosen_order:
                chosen, chosen_order = Close(key, reason, rows, rank), order
    return chosen if chosen is not None else Wait(until)


def _closes(
    bucket: BucketView, now: float, settings: BatcherSettings, draining: bool
) -> tuple[CloseReason | None, int]:
    """Return why the bucket may be closed now, None if it may not, and the most rows of its batch; with a window."""
    most, delay = settings.batch_rows, settings.max_queue_delay
    window_over = delay > 0 and now >= min(bucket.oldest_arrival + delay, bucket.latest_start)
    if settings.preferred_batch_sizes and not window_over:
        rows = preferred_rows(chain.from_iterable(bucket.class_queues), settings)
        if rows:
            return CloseReason.PREFERRED, rows
    if bucket.rows >= bucket.full_rows:
        return CloseReason.FULL, most
    if delay == 0:
        return CloseReason.IDLE, most
    if draining:
        return CloseReason.DRAIN, most
    return (CloseReason.WINDOW, most) if window_over else (None, 0)


def preferred_rows(requests: Iterable[Request], settings: BatcherSettings) -> int:
    """Return the rows of the batch that is closed before its window ends; 0 for none.

    This is Triton's rule (`preferred_batch_size`): the largest preferred size that requests in their order add up to. If
    they exceed the largest preferred size without hitting any, the requests before that.
    """
    best = rows = 0
    for request in requests:
        if rows + request.rows_counted > settings.preferred_batch_sizes[-1] and not best and rows:
            return rows
        if rows + request.rows_counted > settings.batch_rows and rows:
            break
        rows += request.rows_counted
        if rows in settings.preferred_batch_sizes:
            best = rows
    # Beyond the largest preferred size there is nothing to wait for.
    return best or (rows if rows >= settings.preferred_batch_sizes[-1] else 0)
