"""The queued requests of one priority class that may share a batch, and prefixes of such queues by rows."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from operator import attrgetter

from tensorferry.batcher.request import Request

_INF = math.inf

# The order of queued requests: earliest deadline first, then as they were queued.
edf_key = attrgetter("deadline", "order")
_deadline = attrgetter("deadline")


class ClassQueue:
    """The requests of one priority class in one bucket.

    Both lists are ordered by `edf_key`. Guarded by the queue's lock.
    """

    __slots__ = ("max_wait_before_priority", "rows", "with_deadline", "without_deadline")

    def __init__(self) -> None:
        # After this many seconds the oldest request is served first, whatever the deadlines.
        self.max_wait_before_priority = _INF
        self.with_deadline: list[Request] = []
        self.without_deadline: list[Request] = []
        self.rows = 0

    def __iter__(self) -> Iterator[Request]:
        yield from self.with_deadline
        yield from self.without_deadline

    def __len__(self) -> int:
        return len(self.with_deadline) + len(self.without_deadline)

    @property
    def oldest_arrival(self) -> float:
        """Return the earlier arrival of the two requests at the heads; inf when empty."""
        arrival = self.with_deadline[0].arrival if self.with_deadline else _INF
        return min(arrival, self.without_deadline[0].arrival) if self.without_deadline else arrival

    @property
    def serve_by(self) -> float:
        """Return when the first request must be served, by its deadline or its age; inf when empty."""
        aged = self.oldest_arrival + self.max_wait_before_priority
        return min(self.with_deadline[0].deadline, aged) if self.with_deadline else aged

    def add(self, request: Request) -> None:
        """Insert a request in its order."""
        queued = self.with_deadline if request.deadline < _INF else self.without_deadline
        if not queued or (queued[-1].deadline <= request.deadline and queued[-1].order < request.order):
            queued.append(request)
        else:
            insort(queued, request, key=edf_key)
        self.rows += request.rows_counted

    def remove_all(self, requests: list[Request], rows: int) -> None:
        """Remove several requests of `rows` rows in all, given in their order, those without a deadline apart."""
        self.rows -= rows
        mixed = self.with_deadline and self.without_deadline
        for queued in (self.with_deadline, self.without_deadline):
            gone = requests
            if mixed:
                timed = queued is self.with_deadline
                gone = [request for request in requests if (request.deadline < _INF) is timed]
            if not queued or not gone:
                continue
            # Mostly they are neighbours at the head. Removed one by one, each would shift all requests behind it.
            start = 0
            if queued[0] is not gone[0]:
                start = bisect_left(queued, edf_key(gone[0]), key=edf_key)
            stop = start + len(gone)
            if queued[start:stop] == gone:
                del queued[start:stop]
            else:
                for request in gone:
                    del queued[bisect_left(queued, edf_key(request), key=edf_key)]

    def rows_ahead(self, request: Request) -> float:
        """Estimate how many rows are served before a request with a deadline that is not queued yet."""
        queued = self.with_deadline
        if not queued:
            return 0.0
        before = len(queued)
        if queued[-1].deadline > request.deadline:
            before = bisect_left(queued, request.deadline, key=_deadline)
        return self.rows * before / len(self)

    def last(self, rows: int) -> list[Request]:
        """Return the requests that would be served last, of at least `rows` rows if there are as many."""
        found: list[Request] = []
        for request in chain(reversed(self.without_deadline), reversed(self.with_deadline)):
            if rows <= 0:
                break
            found.append(request)
            rows -= request.rows_counted
        return found


def take_prefix(requests: Iterable[Request], rows: int) -> list[Request]:
    """Return the longest prefix of at most `rows` rows; it always has the first request."""
    # Each request counts for at least one row, mostly for exactly one: then the whole slice is the answer.
    head = list(islice(requests, max(1, rows)))
    if total_rows(head) <= rows:
        return head
    return take_prefix_that_fits(head, rows) or head[:1]


def take_prefix_that_fits(requests: Iterable[Request], rows: int) -> list[Request]:
    """Return the longest prefix of at most `rows` rows; it may be empty."""
    prefix: list[Request] = []
    for request in requests:
        if request.rows_counted > rows:
            break
        prefix.append(request)
        rows -= request.rows_counted
    return prefix


def total_rows(requests: Sequence[Request]) -> int:
    """Return the sum of the requests' rows."""
    return sum([request.rows_counted for request in requests])
