"""Who rides in a batch, and who is dropped: pure functions of the queue and the time.

Requests with deadlines ride in the order of these. When those that wait cannot all make
theirs, the *rate rule* drops the fewest oldest such that the batch that then fits is large
enough to keep up with the arrivals. Dropping only what is already lost would be a trap: the
slack that the oldest has left fits a batch too small to keep up, so the next oldest has no
more slack, and so on.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Generic, NamedTuple

from tensorferry.batcher.policy.protocols import BatchTimes, ClassQueueView, QueuedRequest, R

# More rows than any batch has.
_UNBOUNDED = 1 << 62
# A batch finds more than its device's part of what comes for all of them: that, times this power of their number, as did
# best in simulation for two, three, four and eight.
_SHARED = 0.4


class Demand(NamedTuple):
    """What arrives for a device: `rate` in rows a second, `patience` the usual time from arrival to deadline.

    `devices` is how many share what arrives.
    """

    rate: float
    patience: float
    devices: int = 1


class Formed(NamedTuple, Generic[R]):
    """Who rides, those of the leading class first, and who is shed; `rows` that ride of each class."""

    batch: list[R]
    shed: list[R]
    rows: list[int]


def infeasible(requests: Iterable[R], start: float, needs: Callable[[int], float]) -> list[R]:
    """The requests that cannot make their deadline even if they run alone from `start` on; a passed one is one.

    `needs` tells how long so many rows, alone, take at most.
    """
    return [
        request
        for request in requests
        if request.deadline < math.inf and start + needs(request.rows_counted) >= request.deadline
    ]


def riders(requests: Iterable[R], rows: int) -> list[R]:
    """The longest run of requests, in their order, of at most that many rows; the first rides always."""
    # Each counts for at least one row. Mostly for just that, and then this is all.
    head = list(islice(requests, max(1, rows)))
    if _rows(head) <= rows:
        return head
    batch: list[R] = []
    for request in head:
        if batch and request.rows_counted > rows:
            break
        batch.append(request)
        rows -= request.rows_counted
    return batch


def fitting(requests: Iterable[R], rows: int) -> list[R]:
    """As `riders`, but nobody rides who does not fit."""
    batch: list[R] = []
    for request in requests:
        if request.rows_counted > rows:
            break
        batch.append(request)
        rows -= request.rows_counted
    return batch


def form_batch(
    class_queues: Sequence[ClassQueueView[R]],
    lead: int,
    allotted: Sequence[int],
    now: float,
    most: int,
    times: BatchTimes,
    demand: Callable[[], Demand],
) -> Formed[R]:
    """Who rides and who is shed in a batch of at most `most` rows, of requests none of which is infeasible.

    The class `lead` comes first, and only of it is anybody shed; the rows beyond those `allotted`
    to it are the others', as many as are allotted to each, and what is left goes to these by rank.
    Where more of the leading class wait than are allotted to it, it makes room for the others' rows:
    who has no time for a batch with them is shed rather than that the batch leaves without them.
    `demand` is asked only when not all can make their deadlines.
    """
    first = class_queues[lead]
    if len(class_queues) == 1:
        one_row_each = len(first.with_deadline) + len(first.without_deadline) == first.rows
        if one_row_each and not first.with_deadline:
            # The usual case.
            batch = list(islice(first.without_deadline, most))
            return Formed(batch, [], [len(batch)])
        if (
            one_row_each
            and not first.without_deadline
            and times.fit(first.with_deadline[0].deadline - now) >= most
        ):
            # The usual case where they have deadlines: the first has time for a full batch, so all do.
            batch = list(first.with_deadline[:most])
            return Formed(batch, [], [len(batch)])
        batch, shed, _ = _lead(first, most, now, times, demand)
        return Formed(batch, shed, [len(batch) if one_row_each else _rows(batch)])
    queued = [lane.rows for lane in class_queues]
    room = max(1, allot(queued, allotted, most)[lead])
    others = min(sum(queued) - queued[lead], most - room) if queued[lead] > room else 0
    batch, shed, fits = _lead(first, room, now, Beside(times, others) if others else times, demand)
    if others:
        earliest = min([request.deadline for request in batch])
        fits = times.fit(earliest - now) if earliest < math.inf else _UNBOUNDED
    rows = [0] * len(class_queues)
    rows[lead] = _rows(batch)
    queued[lead] = 0
    for rank, share in enumerate(allot(queued, allotted, min(most, fits) - rows[lead])):
        share = min(share, fits - sum(rows))
        if share <= 0:
            continue
        riding = _fillers(class_queues[rank], share, sum(rows), now, times)
        batch += riding
        rows[rank] += _rows(riding)
        if riding and riding[0].deadline < math.inf:
            # Those of lower classes must not make them late.
            fits = min(fits, times.fit(riding[0].deadline - now))
    return Formed(batch, shed, rows)


def _rows(requests: Sequence[QueuedRequest]) -> int:
    return sum([request.rows_counted for request in requests])


@dataclass(frozen=True, slots=True)
class Beside:
    """Batch times by the rows of those who ride beside so many `others`. Implements `BatchTimes`."""

    times: BatchTimes
    others: int

    @property
    def stale(self) -> bool:
        """As `times`."""
        return self.times.stale

    def mean(self, rows: int) -> float:
        """As `times`, of all together."""
        return self.times.mean(rows + self.others)

    def upper(self, rows: int) -> float:
        """As `times`, of all together."""
        return self.times.upper(rows + self.others)

    def fit(self, slack: float) -> int:
        """The most rows beside the others."""
        return self.times.fit(slack) - self.others


def allot(queued: Sequence[int], allotted: Sequence[int], room: int) -> list[int]:
    """The rows of each class in a batch: those allotted first, then what is left by rank."""
    rows = [0] * len(queued)
    for limit in (allotted, queued):
        for rank, waiting in enumerate(queued):
            more = max(0, min(limit[rank], waiting) - rows[rank])
            rows[rank] += min(more, max(0, room - sum(rows)))
    return rows


def _fillers(lane: ClassQueueView[R], share: int, taken: int, now: float, times: BatchTimes) -> list[R]:
    """At most `share` rows that ride along with `taken` others, those that would be late left out."""
    fillers = _dated_fillers(lane, share, taken, now, times)
    if fillers:
        share = min(share, times.fit(fillers[0].deadline - now) - taken)
        share -= _rows(fillers)
    return fillers + fitting(lane.without_deadline, share)


def _dated_fillers(lane: ClassQueueView[R], share: int, taken: int, now: float, times: BatchTimes) -> list[R]:
    with_deadline = lane.with_deadline
    if not with_deadline:
        return []
    # The later the deadline, the larger the batch may be: from the first on who has time for as
    # many as the last has.
    wanted = min(share, lane.rows, times.fit(with_deadline[-1].deadline - now) - taken)
    start = bisect_left(with_deadline, wanted, key=lambda request: times.fit(request.deadline - now) - taken)
    return fitting(islice(with_deadline, start, None), wanted)


def _lead(
    lane: ClassQueueView[R], most: int, now: float, times: BatchTimes, demand: Callable[[], Demand]
) -> tuple[list[R], list[R], int]:
    """Who rides and who is shed of the class that leads, and how large the batch may be for its deadlines.

    Those without a deadline are never shed, and fill the room that the dated leave. Once the
    oldest has waited for the lane's `max_wait_before_priority` seconds, they come first and get up to half of the room, so
    that dated traffic cannot starve them.
    """
    with_deadline, without_deadline = lane.with_deadline, lane.without_deadline
    if not with_deadline:
        return riders(without_deadline, most), [], _UNBOUNDED
    oldest = next(iter(without_deadline), None)
    overdue = oldest is not None and oldest.arrival + lane.max_wait_before_priority <= now
    first = riders(without_deadline, max(1, most // 2)) if overdue else []
    room = most - _rows(first)
    if first:
        # The dated have the next batch to lead: those who would be late beside these wait.
        along = _dated_fillers(lane, room, most - room, now, times)
        return first + along, [], times.fit(along[0].deadline - now) if along else _UNBOUNDED
    chosen, shed, fits = _rate_rule(with_deadline, room, now, times, demand)
    if oldest is None:
        return chosen, shed, fits
    rest = min(room, fits) - _rows(chosen)
    if oldest.rows_counted > rest:
        return chosen, shed, fits
    return chosen + riders(without_deadline, rest), shed, fits


def _rate_rule(
    with_deadline: Sequence[R], room: int, now: float, times: BatchTimes, demand: Callable[[], Demand]
) -> tuple[list[R], list[R], int]:
    """Riders and shed among the dated, and the rows that the riders' deadlines allow in all."""
    fits = times.fit(with_deadline[0].deadline - now)
    wanted = riders(with_deadline, room)
    least = max(fits, with_deadline[0].rows_counted)
    if fits >= room or (rows := _rows(wanted)) <= least:
        return wanted, [], least
    target = _sustainable_rate(room, times, demand())
    # Where each request's rows end when all ride in their order, as far as the search has come.
    costs, ends = iter(with_deadline), [0]
    best_rate, best = -1.0, (0, 1, 0)
    # What is not run is not learned: were a slow spell's times believed for ever, small batches
    # would run for ever that cannot keep up. So now and then one is as large as it can be.
    explore = times.stale and 2 * rows > room
    for start in range(len(with_deadline)):
        if with_deadline[start].rows_counted > room:
            break
        while ends[-1] <= ends[start] + room and (request := next(costs, None)) is not None:
            ends.append(ends[-1] + request.rows_counted)
        fits = max(times.fit(with_deadline[start].deadline - now), with_deadline[start].rows_counted)
        stop = max(start + 1, bisect_right(ends, ends[start] + min(room, fits)) - 1)
        rows = ends[stop] - ends[start]
        rate = rows if explore else rows / max(times.mean(rows), 1e-9)
        if rate > best_rate:
            best_rate, best = rate, (start, stop, fits)
        unlimited = stop == len(with_deadline) or ends[stop + 1] - ends[start] > room
        if unlimited or (rate >= target and not explore):
            break
    start, stop, fits = best
    return list(with_deadline[start:stop]), list(with_deadline[:start]), fits


def _sustainable_rate(room: int, times: BatchTimes, demand: Demand) -> float:
    """Rows a second that must and can be kept up: the arrivals', or what the patience allows in steady state.

    By the line from one row to a full batch, though the times may be a staircase: whether a size
    is just before a step or just beyond it says nothing of what can be kept up.
    """
    fixed, slope = _line(times.mean, room)
    arriving, first, more = demand.rate, fixed, slope
    if demand.devices > 1:
        # What came for the other devices waits here, too. Of all of it there is enough if they start evenly spaced,
        # which they do not; where full batches keep up anyway, to drop anybody for it costs more than it brings.
        first, more = _line(times.upper, room)
        if arriving * times.mean(room) > room:
            arriving *= demand.devices**_SHARED
    # As many as come while the first can wait for a batch of them: n = arriving · (patience - time of n).
    steady = arriving * (demand.patience - first) / (1 + arriving * more)
    size = min(max(round(steady), 1), room)
    return min(demand.rate, size / max(fixed + slope * size, 1e-9))


def _line(seconds: Callable[[int], float], room: int) -> tuple[float, float]:
    """From one row to `room`: what is fixed, and what each row costs."""
    alone, full = seconds(1), seconds(room)
    slope = max((full - alone) / max(room - 1, 1), 1e-12)
    return max(alone - slope, 0.0), slope
