"""A bucket: the queued requests that may share a batch, by class and in the order in which they ride."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import chain
from operator import attrgetter

from tensorferry.batcher.learning.cost_model import Profile
from tensorferry.batcher.queue.fifo import Line
from tensorferry.batcher.request import Request

# A timed wait wakes up late by a little.
_GUARD = 300e-6

_INF = math.inf

_order = attrgetter("order")
_deadline = attrgetter("deadline")


class Lane:
    """The requests of one class: those with a deadline, the earliest first, and those without, by arrival.

    Implements the policy's `LaneView`. Guarded by the queue's lock.
    """

    __slots__ = ("aging", "dated", "patient", "rows")

    def __init__(self) -> None:
        # How long the oldest waits before the lane is due, whatever its deadlines.
        self.aging = _INF
        self.dated: list[Request] = []
        self.patient = Line()
        self.rows = 0

    def __iter__(self) -> Iterator[Request]:
        yield from self.dated
        yield from self.patient

    def __len__(self) -> int:
        return len(self.dated) + len(self.patient)

    @property
    def oldest_arrival(self) -> float:
        """The arrival of the first that rides; inf when there is none."""
        dated = self.dated[0].arrival if self.dated else _INF
        return min(dated, next(iter(self.patient)).arrival) if self.patient else dated

    @property
    def due(self) -> float:
        """When the first must ride, by its deadline or by its age; inf when there is none."""
        aged = self.oldest_arrival + self.aging
        return min(self.dated[0].deadline, aged) if self.dated else aged

    def add(self, request: Request) -> None:
        """Puts a request in its place."""
        if request.deadline == _INF:
            self.patient.append(request)
        elif not self.dated or self.dated[-1].order < request.order:
            self.dated.append(request)
        else:
            insort(self.dated, request, key=_order)
        self.rows += request.cost

    def remove(self, request: Request) -> None:
        """Takes a request out."""
        if request.deadline == math.inf:
            self.patient.remove(request)
        elif self.dated[0] is request:
            del self.dated[0]
        else:
            del self.dated[bisect_left(self.dated, request.order, key=_order)]
        self.rows -= request.cost

    def remove_all(self, requests: list[Request], rows: int) -> None:
        """Takes several out, of so many rows together; those with a deadline in the order of these."""
        patient = self.patient
        dated = requests
        if not self.dated:
            dated = []
        elif patient:
            dated = [request for request in requests if request.deadline < _INF]
        if dated:
            # Nearly always neighbours, and the first: one by one, all behind them would move each time.
            start = 0
            if self.dated[0] is not dated[0]:
                start = bisect_left(self.dated, dated[0].order, key=_order)
            stop = start + len(dated)
            if self.dated[start:stop] == dated:
                del self.dated[start:stop]
            else:
                for request in dated:
                    del self.dated[bisect_left(self.dated, request.order, key=_order)]
        if not dated:
            patient.remove_all(requests)
        elif len(dated) < len(requests):
            patient.remove_all([request for request in requests if request.deadline == _INF])
        self.rows -= rows

    def put_back(self, request: Request) -> None:
        """Puts a request that had left in its place, which without a deadline is the first."""
        if request.deadline == _INF:
            self.patient.head(request)
            self.rows += request.cost
        else:
            self.add(request)

    def ahead(self, request: Request) -> float:
        """About how many rows ride before a request with a deadline that is not in here."""
        dated = self.dated
        if not dated:
            return 0.0
        before = len(dated)
        if dated[-1].deadline > request.deadline:
            before = bisect_left(dated, request.deadline, key=_deadline)
        return self.rows * before / len(self)

    def last(self, rows: int) -> list[Request]:
        """The requests that would ride last, of at least so many rows if there are as many."""
        found: list[Request] = []
        for request in chain(reversed(self.patient), reversed(self.dated)):
            if rows <= 0:
                break
            found.append(request)
            rows -= request.cost
        return found


class Bucket:
    """The lanes of a bucket, the highest class first. Implements the policy's `BucketView`.

    It is kept, with what was learned of it, while it is empty. Guarded by the queue's lock.
    """

    __slots__ = ("lanes", "profile", "rows")

    def __init__(self, profile: Profile, classes: int) -> None:
        self.profile = profile
        self.lanes = [Lane() for _ in range(classes)]
        self.rows = 0

    def __bool__(self) -> bool:
        return self.rows > 0

    def __iter__(self) -> Iterator[Request]:
        for lane in self.lanes:
            yield from lane

    def __len__(self) -> int:
        if len(self.lanes) > 1:
            return sum(map(len, self.lanes))
        lane = self.lanes[0]
        return len(lane.dated) + len(lane.patient)

    @property
    def oldest_arrival(self) -> float:
        """The earliest arrival of those that ride first in their lanes."""
        return min([lane.oldest_arrival for lane in self.lanes])

    @property
    def earliest_deadline(self) -> float:
        """The earliest deadline; inf when no request has one."""
        earliest = _INF
        for lane in self.lanes:
            if lane.dated:
                earliest = min(earliest, lane.dated[0].deadline)
        return earliest

    @property
    def latest_start(self) -> float:
        """When the batch must leave for the earliest deadline to be met; inf for none."""
        earliest = self.earliest_deadline
        if earliest == math.inf:
            return math.inf
        return earliest - self.profile.upper(self.rows) - _GUARD
