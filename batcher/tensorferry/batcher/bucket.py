"""A bucket: the queued requests that may share a batch, in the order in which they ride."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter

from tensorferry.batcher.latency import LatencyModel
from tensorferry.batcher.request import Request

# A timed wait wakes up late by a little.
_GUARD = 300e-6

# For how long an observation of a batch's time is trusted to refuse requests by it.
_FRESH_SECONDS = 1.0

_order = attrgetter("order")


@dataclass(slots=True)
class Profile:
    """What was learned of a bucket, kept while it is empty."""

    times: LatencyModel
    observed: float = -math.inf

    def needs(self, rows: int, now: float) -> float:
        """How long so many rows take at most, in seconds; 0 when that is not known, or was long ago.

        What is refused is not observed: were old knowledge trusted, a device that was slow once
        would refuse for ever.
        """
        return self.times.upper(rows) if now - self.observed < _FRESH_SECONDS else 0.0


class Bucket:
    """Requests with a deadline, the earliest first, and those without, in order of arrival.

    Implements the policy's `BucketView`. Guarded by the queue's lock.
    """

    __slots__ = ("aging", "dated", "patient", "profile", "rows")

    def __init__(self, profile: Profile, aging: float) -> None:
        self.profile = profile
        # How long the oldest waits before the bucket is due, whatever its deadlines.
        self.aging = aging
        self.dated: list[Request] = []
        # Ordered, with removal of any one request in constant time: cancels are common.
        self.patient: OrderedDict[Request, None] = OrderedDict()
        self.rows = 0

    def __bool__(self) -> bool:
        return bool(self.dated or self.patient)

    def __iter__(self) -> Iterator[Request]:
        yield from self.dated
        yield from self.patient

    def __len__(self) -> int:
        return len(self.dated) + len(self.patient)

    @property
    def oldest_arrival(self) -> float:
        """The arrival of the first that rides."""
        heads = [self.dated[0].arrival] if self.dated else []
        if self.patient:
            heads.append(next(iter(self.patient)).arrival)
        return min(heads)

    @property
    def earliest_deadline(self) -> float:
        """The earliest deadline; inf when no request has one."""
        return self.dated[0].deadline if self.dated else math.inf

    @property
    def latest_start(self) -> float:
        """When the batch must leave for the earliest deadline to be met; inf for none."""
        if not self.dated:
            return math.inf
        return self.earliest_deadline - self.profile.times.upper(self.rows) - _GUARD

    @property
    def due(self) -> float:
        """When the first must ride, by its deadline or by its age."""
        return min(self.earliest_deadline, self.oldest_arrival + self.aging)

    def add(self, request: Request) -> None:
        """Puts a request in its place."""
        if request.deadline == math.inf:
            self.patient[request] = None
        elif not self.dated or self.dated[-1].order < request.order:
            self.dated.append(request)
        else:
            insort(self.dated, request, key=_order)
        self.rows += request.cost

    def remove(self, request: Request) -> None:
        """Takes a request out."""
        if request.deadline == math.inf:
            del self.patient[request]
        elif self.dated[0] is request:
            del self.dated[0]
        else:
            del self.dated[bisect_left(self.dated, request.order, key=_order)]
        self.rows -= request.cost
