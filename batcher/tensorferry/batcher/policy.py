"""When a batch leaves and who rides in it: pure functions over a view of the queue and the time.

The rule is late-binding and work-conserving: `decide` is asked when the device can start a
batch, and closes one whenever a request waits, unless `max_queue_delay` gives a window. The
window runs from a request's arrival, so what a request has already waited counts.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
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
    def earliest_deadline(self) -> float:
        """The earliest deadline among them, or any earlier time."""


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


def decide(
    buckets: Mapping[Hashable, BucketView], now: float, limits: Limits, draining: bool
) -> Close | Wait:
    """Which bucket's batch leaves now, or how long nothing does.

    Among the buckets that may leave, the one whose oldest request came first does; so no
    bucket starves behind busier ones. Expired requests must have been taken out before; the
    wait ends when the next one expires, so that it hears of it.
    """
    until = math.inf
    chosen: Close | None = None
    chosen_arrival = math.inf
    for key, bucket in buckets.items():
        window_end = bucket.oldest_arrival + limits.max_queue_delay
        if bucket.rows >= limits.max_batch_size:
            reason = CloseReason.FULL
        elif limits.max_queue_delay == 0:
            reason = CloseReason.IDLE
        elif draining:
            reason = CloseReason.DRAIN
        elif now >= window_end:
            reason = CloseReason.WINDOW
        else:
            until = min(until, window_end, bucket.earliest_deadline)
            continue
        if bucket.oldest_arrival < chosen_arrival:
            chosen, chosen_arrival = Close(key, reason), bucket.oldest_arrival
    return chosen if chosen is not None else Wait(until)


def expired(requests: Iterable[R], now: float) -> list[R]:
    """The requests whose deadline has passed."""
    return [request for request in requests if request.deadline <= now]


def riders(requests: Iterable[R], limits: Limits) -> list[R]:
    """The longest run of requests, in their order, that fits a batch; the first rides always."""
    batch: list[R] = []
    rows = 0
    for request in requests:
        if batch and rows + request.cost > limits.max_batch_size:
            break
        batch.append(request)
        rows += request.cost
    return batch
