"""How long requests may be queued, and how many: the policies of the priority classes.

A timeout ends with the queue: once a request's batch has left, it has none. A deadline is another thing: by it
the answer must be there.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from itertools import count

from tensorferry.batcher.request import QUEUED, Request
from tensorferry.batcher.settings import QueuePolicy

# What is done with is dropped when there is so much more of it than of the rest.
_LEAST = 64
_GROWTH = 2


class TimeoutHeap:
    """The queued requests that time out, the earliest first. Not thread-safe: the queue's lock guards it."""

    def __init__(self, policies: Sequence[QueuePolicy]) -> None:
        self.policies = tuple(policies)
        self._heap: list[tuple[float, int, Request]] = []
        self._numbers = count()
        self._most = _LEAST

    def policy(self, request: Request) -> QueuePolicy:
        """That of the request's class."""
        return self.policies[request.priority - 1]

    def add(self, request: Request) -> None:
        """A request is queued."""
        policy = self.policy(request)
        timeout = min(policy.timeout, request.patience) if policy.overridable else policy.timeout
        if timeout == math.inf:
            return
        if len(self._heap) >= self._most:
            # Most have left long before their time, and would be kept until then.
            self._heap = [entry for entry in self._heap if entry[2].state is QUEUED]
            heapq.heapify(self._heap)
            self._most = max(_LEAST, _GROWTH * len(self._heap))
        heapq.heappush(self._heap, (request.arrival + timeout, next(self._numbers), request))

    def next(self) -> float:
        """When the first that is still queued times out; inf for never."""
        heap = self._heap
        while heap and heap[0][2].state is not QUEUED:
            heapq.heappop(heap)
        return heap[0][0] if heap else math.inf

    def take(self, now: float) -> list[Request]:
        """Those that are still queued and whose time is over; of each it is told once."""
        over = []
        while self.next() <= now:
            over.append(heapq.heappop(self._heap)[2])
        return over

    def forget(self, requests: Sequence[Request]) -> None:
        """These have no timeout any more."""
        gone = set(map(id, requests))
        self._heap = [entry for entry in self._heap if id(entry[2]) not in gone]
        heapq.heapify(self._heap)
