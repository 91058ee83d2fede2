"""Expiry of queued requests: by deadline, or by the timeout of their class's queue policy.

A queue timeout ends when the request's batch is dispatched. By its deadline the request must be answered.
"""

from __future__ import annotations

import heapq
import math
import threading
from collections.abc import Iterable, Sequence
from itertools import count

from tensorferry.batcher.clock import Clock
from tensorferry.batcher.queue.backlog import Backlog
from tensorferry.batcher.queue.devices import Devices
from tensorferry.batcher.request import QUEUED, Request
from tensorferry.batcher.settings import QueuePolicy

# The heap is purged of requests that are no longer queued when it reaches this size, and then each time that it
# has grown by this factor.
_MIN_PURGE_SIZE = 64
_PURGE_GROWTH = 2


class Expiry:
    """Finds requests that must expire, and wakes the expiry thread in time. Guarded by the queue's lock.

    A worker that waits expires requests itself, so the expiry thread is woken only while every worker is busy.
    `policies` has one entry for each class, or none at all.
    """

    def __init__(
        self, lock: threading.Lock, backlog: Backlog, devices: Devices, policies: Sequence[QueuePolicy]
    ) -> None:
        self._backlog = backlog
        self._devices = devices
        self._policies = policies
        # Whether requests may time out.
        self.has_timeouts = bool(policies)
        # The queued requests that have a timeout, the earliest first.
        self._heap: list[tuple[float, int, Request]] = []
        self._numbers = count()
        self._purge_size = _MIN_PURGE_SIZE
        # A request must expire while no worker is free to see it, or the queue closes. The expiry thread waits
        # for it, until `wait_until` at most; -inf if it does not wait, or is notified.
        self._due = threading.Condition(lock)
        self.wait_until = -math.inf

    def wait(self, clock: Clock, until: float) -> None:
        """Let the expiry thread wait, at most until `until`."""
        self.wait_until = until
        if until < math.inf:
            clock.wait(self._due, until)
        else:
            self._due.wait()
        self.wait_until = -math.inf

    def notify(self) -> None:
        """Wake the expiry thread."""
        self._due.notify()

    def notify_by(self, due: float) -> None:
        """Wake the expiry thread if it would sleep past `due` and no worker is free to expire requests then."""
        if due >= self.wait_until or self._devices.has_free_waiter:
            return
        self._due.notify()
        self.wait_until = -math.inf

    def queued(self, requests: Sequence[Request]) -> None:
        """Note a request that was queued, or the parts of one, if there are timeouts; else `notify_by` does."""
        for request in requests:
            policy = self._policies[request.priority - 1]
            timeout = min(policy.timeout, request.max_queue_time) if policy.overridable else policy.timeout
            if timeout == math.inf:
                continue
            if len(self._heap) >= self._purge_size:
                # Most requests are dispatched long before their timeout.
                self._keep(entry for entry in self._heap if entry[2].state is QUEUED)
                self._purge_size = max(_MIN_PURGE_SIZE, _PURGE_GROWTH * len(self._heap))
            heapq.heappush(self._heap, (request.arrival + timeout, next(self._numbers), request))
        self.notify_by(min(requests[0].deadline, self.next_timeout()))

    def requeued(self, requests: Sequence[Request]) -> None:
        """Note requests that are queued again: their timeouts ended when they were dispatched."""
        gone = set(map(id, requests))
        self._keep(entry for entry in self._heap if id(entry[2]) not in gone)

    def _keep(self, entries: Iterable[tuple[float, int, Request]]) -> None:
        self._heap = list(entries)
        heapq.heapify(self._heap)

    def next(self, now: float) -> float:
        """Return when the first queued request times out or can no longer meet its deadline; inf for never."""
        return min(self._backlog.next_infeasible(now), self.next_timeout())

    def next_timeout(self) -> float:
        """Return when the first request that is still queued times out; inf for never."""
        heap = self._heap
        while heap and heap[0][2].state is not QUEUED:
            heapq.heappop(heap)
        return heap[0][0] if heap else math.inf

    def timed_out(self, now: float) -> list[Request]:
        """Return the queued requests that fail by their queue timeout; move those whose policy only delays them."""
        failed: list[Request] = []
        while self.next_timeout() <= now:
            request = heapq.heappop(self._heap)[2]
            if self._policies[request.priority - 1].delays:
                self._backlog.move(request, request.rank + 1)
            else:
                request.timed_out = True
                failed.append(request)
        return failed
