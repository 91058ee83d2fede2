"""Forming of batches: pure functions of the queue and the time.

Requests with deadlines are taken in the order of these; `load_shedding` decides which are dropped.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from tensorferry.batcher.policy.class_queue import ClassQueue, take_prefix, take_prefix_that_fits, total_rows
from tensorferry.batcher.policy.load_shedding import ArrivalDemand, KeptAndShed, rate_rule
from tensorferry.batcher.policy.protocols import BatchTimes
from tensorferry.batcher.request import Request

# More rows than any batch has.
_UNBOUNDED = 1 << 62


class FormedBatch(NamedTuple):
    """A batch, its leading class first, the requests shed for it, and its rows by class."""

    batch: list[Request]
    shed: list[Request]
    rows: list[int]


def form_batch(
    class_queues: Sequence[ClassQueue],
    leading_class: int,
    quota: Sequence[int],
    now: float,
    most: int,
    times: BatchTimes,
    demand: Callable[[], ArrivalDemand],
) -> FormedBatch:
    """Form a batch of at most `most` rows from requests that are all feasible.

    The leading class comes first, and only its requests are shed. Rows beyond its quota go to the other classes, first by
    their quota, then by rank. If more rows of the leading class are queued than its quota, it leaves room for the others:
    a request without time for a batch with these is shed, rather than that the batch runs without them. `demand` is
    called only if not all can make their deadlines.
    """
    first = class_queues[leading_class]
    if len(class_queues) == 1:
        if not first.with_deadline and (first.rows <= most or len(first.without_deadline) == first.rows):
            # Fast path without deadlines: all fit, or each has one row.
            return FormedBatch(list(islice(first.without_deadline, most)), [], [min(first.rows, most)])
        one_row_each = len(first.with_deadline) + len(first.without_deadline) == first.rows
        if (
            one_row_each
            and not first.without_deadline
            and times.max_rows_within(first.with_deadline[0].deadline - now) >= most
        ):
            # Fast path with deadlines: the first has time for a full batch, so all do.
            batch = list(first.with_deadline[:most])
            return FormedBatch(batch, [], [len(batch)])
        batch, shed, _ = _leading_rows(first, most, now, times, demand)
        return FormedBatch(batch, shed, [len(batch) if one_row_each else total_rows(batch)])
    queued = [queue.rows for queue in class_queues]
    room = max(1, divide_rows(queued, quota, most)[leading_class])
    others = min(sum(queued) - queued[leading_class], most - room) if queued[leading_class] > room else 0
    batch, shed, fits = _leading_rows(
        first, room, now, TimesWithOthers(times, others) if others else times, demand
    )
    if others:
        earliest = min([request.deadline for request in batch])
        fits = times.max_rows_within(earliest - now) if earliest < math.inf else _UNBOUNDED
    rows = [0] * len(class_queues)
    rows[leading_class] = total_rows(batch)
    queued[leading_class] = 0
    for rank, share in enumerate(divide_rows(queued, quota, min(most, fits) - rows[leading_class])):
        share = min(share, fits - sum(rows))
        if share <= 0:
            continue
        added = _fill_remaining(class_queues[rank], share, sum(rows), now, times)
        batch += added
        rows[rank] += total_rows(added)
        if added and added[0].deadline < math.inf:
            # Lower classes must not make these late.
            fits = min(fits, times.max_rows_within(added[0].deadline - now))
    return FormedBatch(batch, shed, rows)


def without_repeats(formed: FormedBatch) -> FormedBatch:
    """Return a batch without the requests whose `content` an earlier one of it has."""
    if {request.content for request in formed.batch} <= {None}:
        return formed
    seen: set[bytes] = set()
    batch: list[Request] = []
    rows = list(formed.rows)
    for request in formed.batch:
        if request.content in seen:
            rows[request.rank] -= request.rows_counted
            continue
        batch.append(request)
        if request.content is not None:
            seen.add(request.content)
    return FormedBatch(batch, formed.shed, rows)


@dataclass(frozen=True, slots=True)
class TimesWithOthers:
    """Batch times by the rows that share a batch with `others` more rows. Implements `BatchTimes`."""

    times: BatchTimes
    others: int

    @property
    def stale(self) -> bool:
        """See `BatchTimes`."""
        return self.times.stale

    def mean(self, rows: int) -> float:
        """Return the expected time of the whole batch."""
        return self.times.mean(rows + self.others)

    def upper(self, rows: int) -> float:
        """Return the time of the whole batch with a margin."""
        return self.times.upper(rows + self.others)

    def max_rows_within(self, slack: float) -> int:
        """Return the most rows beside the others."""
        return self.times.max_rows_within(slack) - self.others


def divide_rows(queued: Sequence[int], quota: Sequence[int], room: int) -> list[int]:
    """Return the rows of each class in a batch: first by quota, then the remaining room by rank."""
    rows = [0] * len(queued)
    for limit in (quota, queued):
        for rank, waiting in enumerate(queued):
            more = max(0, min(limit[rank], waiting) - rows[rank])
            rows[rank] += min(more, max(0, room - sum(rows)))
    return rows


def _fill_remaining(
    queue: ClassQueue, share: int, taken: int, now: float, times: BatchTimes
) -> list[Request]:
    """Return at most `share` rows to add to a batch of `taken` rows, without requests that would be late."""
    added = _fill_with_deadlines(queue, share, taken, now, times)
    if added:
        share = min(share, times.max_rows_within(added[0].deadline - now) - taken)
        share -= total_rows(added)
    return added + take_prefix_that_fits(queue.without_deadline, share)


def _fill_with_deadlines(
    queue: ClassQueue, share: int, taken: int, now: float, times: BatchTimes
) -> list[Request]:
    with_deadline = queue.with_deadline
    if not with_deadline:
        return []
    # The later the deadline, the larger the batch may be. Start at the first request with time for as many rows as the
    # last has time for.
    wanted = min(share, queue.rows, times.max_rows_within(with_deadline[-1].deadline - now) - taken)
    start = bisect_left(
        with_deadline, wanted, key=lambda request: times.max_rows_within(request.deadline - now) - taken
    )
    return take_prefix_that_fits(islice(with_deadline, start, None), wanted)


def _leading_rows(
    queue: ClassQueue, most: int, now: float, times: BatchTimes, demand: Callable[[], ArrivalDemand]
) -> KeptAndShed:
    """Choose the rows of the leading class.

    Requests without a deadline are never shed, and fill the room that the others leave. Once the oldest has waited for
    the queue's `max_wait_before_priority` seconds, they come first and get up to half of the room, so that requests with
    deadlines cannot starve them.
    """
    with_deadline, without_deadline = queue.with_deadline, queue.without_deadline
    if not with_deadline:
        return KeptAndShed(take_prefix(without_deadline, most), [], _UNBOUNDED)
    oldest = next(iter(without_deadline), None)
    overdue = oldest is not None and oldest.arrival + queue.max_wait_before_priority <= now
    first = take_prefix(without_deadline, max(1, most // 2)) if overdue else []
    room = most - total_rows(first)
    if first:
        # Requests with deadlines lead the next batch: those that would be late in this one wait.
        added = _fill_with_deadlines(queue, room, most - room, now, times)
        allowed = times.max_rows_within(added[0].deadline - now) if added else _UNBOUNDED
        return KeptAndShed(first + added, [], allowed)
    chosen = rate_rule(with_deadline, room, now, times, demand)
    if oldest is None:
        return chosen
    remaining = min(room, chosen.rows_allowed) - total_rows(chosen.kept)
    if oldest.rows_counted > remaining:
        return chosen
    return chosen._replace(kept=chosen.kept + take_prefix(without_deadline, remaining))
