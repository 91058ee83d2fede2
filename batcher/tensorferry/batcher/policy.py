"""When a batch leaves, who rides in it, and who is dropped: pure functions of the queue and the time.

The rule is late-binding and work-conserving: `decide` is asked when the device can start a
batch, and closes one whenever a request waits, unless `max_queue_delay` gives a window. The
window runs from a request's arrival, so what a request has already waited counts.

Requests with deadlines ride in the order of these. When those that wait cannot all make
theirs, the *rate rule* drops the fewest oldest such that the batch that then fits is large
enough to keep up with the arrivals. Dropping only what is already lost would be a trap: the
slack that the oldest has left fits a batch too small to keep up, so the next oldest has no
more slack, and so on.
"""

from __future__ import annotations

import enum
import math
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol, TypeVar


class Waiting(Protocol):
    """What the policy sees of a queued request; `Request` is the real one, tests bring their own."""

    @property
    def cost(self) -> int:
        """Rows, at least one."""

    @property
    def arrival(self) -> float:
        """When it was accepted."""

    @property
    def deadline(self) -> float:
        """Absolute; inf for none."""


R = TypeVar("R", bound=Waiting)


class BucketView(Protocol):
    """What the policy sees of the queued requests that may share a batch: never empty."""

    @property
    def rows(self) -> int:
        """The sum of their costs."""

    @property
    def oldest_arrival(self) -> float:
        """The arrival of the one that came first."""

    @property
    def due(self) -> float:
        """When the bucket must be served at the latest, to be compared with other buckets'."""

    @property
    def latest_start(self) -> float:
        """When its batch must leave at the latest for the earliest deadline to be met; inf for none."""


class BatchTimes(Protocol):
    """How long batches take, in seconds: `LatencyModel` is the real one."""

    def mean(self, rows: int) -> float:
        """Expected; 0 when nothing is known."""

    def upper(self, rows: int) -> float:
        """With a margin; 0 when nothing is known."""

    def fit(self, slack: float) -> int:
        """The most rows whose `upper` is within the slack."""


class CloseReason(enum.Enum):
    """Why a batch left."""

    FULL = "full"
    WINDOW = "window"
    IDLE = "idle"
    DRAIN = "drain"


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_batch_size` in rows (at least 1), `max_queue_delay` in seconds from arrival (0: no window)."""

    max_batch_size: int
    max_queue_delay: float


@dataclass(frozen=True, slots=True)
class Close:
    """Form a batch from this bucket now."""

    key: Hashable
    reason: CloseReason


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing leaves before `until` (inf: before something arrives)."""

    until: float


@dataclass(frozen=True, slots=True)
class Demand:
    """What arrives at a bucket: `rate` in rows a second, `patience` the usual time from arrival to deadline."""

    rate: float
    patience: float


def decide(
    buckets: Mapping[Hashable, BucketView], now: float, limits: Limits, draining: bool
) -> Close | Wait:
    """Which bucket's batch leaves now, or how long nothing does.

    Among the buckets that may leave, the one that is due first does; so no bucket starves
    behind busier ones. A window ends early when a deadline would be missed by its end.
    """
    until = math.inf
    chosen: Close | None = None
    chosen_due = (math.inf, math.inf)
    for key, bucket in buckets.items():
        window_end = min(bucket.oldest_arrival + limits.max_queue_delay, bucket.latest_start)
        if bucket.rows >= limits.max_batch_size:
            reason = CloseReason.FULL
        elif limits.max_queue_delay == 0:
            reason = CloseReason.IDLE
        elif draining:
            reason = CloseReason.DRAIN
        elif now >= window_end:
            reason = CloseReason.WINDOW
        else:
            until = min(until, window_end)
            continue
        due = (bucket.due, bucket.oldest_arrival)
        if due < chosen_due:
            chosen, chosen_due = Close(key, reason), due
    return chosen if chosen is not None else Wait(until)


def infeasible(requests: Iterable[R], now: float, needs: Callable[[int], float]) -> list[R]:
    """The requests that cannot make their deadline even if they run alone now; a passed one is one.

    `needs` tells how many seconds so many rows take at most.
    """
    return [
        request
        for request in requests
        if request.deadline < math.inf and now + needs(request.cost) >= request.deadline
    ]


def riders(requests: Iterable[R], rows: int) -> list[R]:
    """The longest run of requests, in their order, of at most that many rows; the first rides always."""
    batch: list[R] = []
    for request in requests:
        if batch and request.cost > rows:
            break
        batch.append(request)
        rows -= request.cost
    return batch


def form_batch(
    dated: Sequence[R],
    patient: Sequence[R],
    now: float,
    limits: Limits,
    times: BatchTimes,
    demand: Demand,
    aging: float,
) -> tuple[list[R], list[R]]:
    """Who rides and who is shed.

    `dated` are the requests with a deadline, the earliest first, none of them infeasible;
    `patient` those without, in order of arrival: they are never shed, and fill the room that
    the dated leave. Once the oldest has waited for `aging` seconds, they come first and get up
    to half of the batch, so that dated traffic cannot starve them.
    """
    most = limits.max_batch_size
    if not dated:
        return riders(patient, most), []
    overdue = bool(patient) and patient[0].arrival + aging <= now
    first = riders(patient, max(1, most // 2)) if overdue else []
    room = most - sum(request.cost for request in first)
    if dated[0].cost > room:
        # Only where an overdue request leaves no room; the dated lead the next batch.
        return first, []
    chosen, shed, fits = _rate_rule(dated, room, now, times, demand)
    rest = min(room, fits) - sum(request.cost for request in chosen)
    if first or not patient or patient[0].cost > rest:
        return first + chosen, shed
    return chosen + riders(patient, rest), shed


def _rate_rule(
    dated: Sequence[R], room: int, now: float, times: BatchTimes, demand: Demand
) -> tuple[list[R], list[R], int]:
    """Riders and shed among the dated, and the rows that the riders' deadlines allow in all."""
    fits = times.fit(dated[0].deadline - now)
    wanted = riders(dated, room)
    if sum(request.cost for request in wanted) <= max(fits, dated[0].cost):
        return wanted, [], max(fits, dated[0].cost)
    target = _sustainable_rate(room, times, demand)
    ends = list(accumulate((request.cost for request in dated), initial=0))
    best_rate, best = -1.0, (0, 1, 0)
    for start in range(len(dated)):
        if dated[start].cost > room:
            break
        fits = max(times.fit(dated[start].deadline - now), dated[start].cost)
        stop = max(start + 1, bisect_right(ends, ends[start] + min(room, fits)) - 1)
        rows = ends[stop] - ends[start]
        rate = rows / max(times.mean(rows), 1e-9)
        if rate > best_rate:
            best_rate, best = rate, (start, stop, fits)
        unlimited = stop == len(dated) or ends[stop + 1] - ends[start] > room
        if rate >= target or unlimited:
            break
    start, stop, fits = best
    return list(dated[start:stop]), list(dated[:start]), fits


def _sustainable_rate(room: int, times: BatchTimes, demand: Demand) -> float:
    """Rows a second that must and can be kept up: the arrivals', or what the patience allows in steady state.

    By the line from one row to a full batch, though the times may be a staircase: whether a size
    is just before a step or just beyond it says nothing of what can be kept up.
    """
    alone, full = times.mean(1), times.mean(room)
    slope = max((full - alone) / max(room - 1, 1), 1e-12)
    fixed = max(alone - slope, 0.0)
    steady = demand.rate * (demand.patience - fixed) / (1 + demand.rate * slope)
    size = min(max(round(steady), 1), room)
    return min(demand.rate, size / max(fixed + slope * size, 1e-9))
