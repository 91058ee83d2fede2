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

_edf_key = attrgetter("edf_key")
_deadline = attrgetter("deadline")


class ClassQueue:
    """The requests of one class: those with a deadline, the earliest first, and those without, by arrival.

    Implements the policy's `ClassQueueView`. Guarded by the queue's lock.
    """

    __slots__ = ("max_wait_before_priority", "rows", "with_deadline", "without_deadline")

    def __init__(self) -> None:
        # How long the oldest waits before the lane is due, whatever its deadlines.
        self.max_wait_before_priority = _INF
        self.with_deadline: list[Request] = []
        self.without_deadline = Line()
        self.rows = 0

    def __iter__(self) -> Iterator[Request]:
        yield from self.with_deadline
        yield from self.without_deadline

    def __len__(self) -> int:
        return len(self.with_deadline) + len(self.without_deadline)

    @property
    def oldest_arrival(self) -> float:
        """The arrival of the first that rides; inf when there is none."""
        with_deadline = self.with_deadline[0].arrival if self.with_deadline else _INF
        return (
            min(with_deadline, next(iter(self.without_deadline)).arrival)
            if self.without_deadline
            else with_deadline
        )

    @property
    def due(self) -> float:
        """When the first must ride, by its deadline or by its age; inf when there is none."""
        aged = self.oldest_arrival + self.max_wait_before_priority
        return min(self.with_deadline[0].deadline, aged) if self.with_deadline else aged

    def add(self, request: Request) -> None:
        """Puts a request in its place."""
        if request.deadline == _INF:
            self.without_deadline.append(request)
        elif not self.with_deadline or self.with_deadline[-1].edf_key < request.edf_key:
            self.with_deadline.append(request)
        else:
            insort(self.with_deadline, request, key=_edf_key)
        self.rows += request.rows_counted

    def remove(self, request: Request) -> None:
        """Takes a request out."""
        if request.deadline == math.inf:
            self.without_deadline.remove(request)
        elif self.with_deadline[0] is request:
            del self.with_deadline[0]
        else:
            del self.with_deadline[bisect_left(self.with_deadline, request.edf_key, key=_edf_key)]
        self.rows -= request.rows_counted

    def remove_all(self, requests: list[Request], rows: int) -> None:
        """Takes several out, of so many rows together; those with a deadline in the order of these."""
        without_deadline = self.without_deadline
        with_deadline = requests
        if not self.with_deadline:
            with_deadline = []
        elif without_deadline:
            with_deadline = [request for request in requests if request.deadline < _INF]
        if with_deadline:
            # Nearly always neighbours, and the first: one by one, all behind them would move each time.
            start = 0
            if self.with_deadline[0] is not with_deadline[0]:
                start = bisect_left(self.with_deadline, with_deadline[0].edf_key, key=_edf_key)
            stop = start + len(with_deadline)
            if self.with_deadline[start:stop] == with_deadline:
                del self.with_deadline[start:stop]
            else:
                for request in with_deadline:
                    del self.with_deadline[bisect_left(self.with_deadline, request.edf_key, key=_edf_key)]
        if not with_deadline:
            without_deadline.remove_all(requests)
        elif len(with_deadline) < len(requests):
            without_deadline.remove_all([request for request in requests if request.deadline == _INF])
        self.rows -= rows

    def put_back(self, request: Request) -> None:
        """Puts a request that had left in its place, which without a deadline is the first."""
        if request.deadline == _INF:
            self.without_deadline.head(request)
            self.rows += request.rows_counted
        else:
            self.add(request)

    def ahead(self, request: Request) -> float:
        """About how many rows ride before a request with a deadline that is not in here."""
        with_deadline = self.with_deadline
        if not with_deadline:
            return 0.0
        before = len(with_deadline)
        if with_deadline[-1].deadline > request.deadline:
            before = bisect_left(with_deadline, request.deadline, key=_deadline)
        return self.rows * before / len(self)

    def last(self, rows: int) -> list[Request]:
        """The requests that would ride last, of at least so many rows if there are as many."""
        found: list[Request] = []
        for request in chain(reversed(self.without_deadline), reversed(self.with_deadline)):
            if rows <= 0:
                break
            found.append(request)
            rows -= request.rows_counted
        return found


class Bucket:
    """The lanes of a bucket, the highest class first. Implements the policy's `BucketView`.

    It is kept, with what was learned of it, while it is empty. Guarded by the queue's lock.
    """

    __slots__ = ("class_queues", "profile", "rows")

    def __init__(self, profile: Profile, classes: int) -> None:
        self.profile = profile
        self.class_queues = [ClassQueue() for _ in range(classes)]
        self.rows = 0

    def __bool__(self) -> bool:
        return self.rows > 0

    def __iter__(self) -> Iterator[Request]:
        for lane in self.class_queues:
            yield from lane

    def __len__(self) -> int:
        if len(self.class_queues) > 1:
            return sum(map(len, self.class_queues))
        lane = self.class_queues[0]
        return len(lane.with_deadline) + len(lane.without_deadline)

    @property
    def oldest_arrival(self) -> float:
        """The earliest arrival of those that ride first in their lanes."""
        return min([lane.oldest_arrival for lane in self.class_queues])

    @property
    def earliest_deadline(self) -> float:
        """The earliest deadline; inf when no request has one."""
        earliest = _INF
        for lane in self.class_queues:
            if lane.with_deadline:
                earliest = min(earliest, lane.with_deadline[0].deadline)
        return earliest

    @property
    def latest_start(self) -> float:
        """When the batch must leave for the earliest deadline to be met; inf for none."""
        earliest = self.earliest_deadline
        if earliest == math.inf:
            return math.inf
        return earliest - self.profile.upper(self.rows) - _GUARD
