"""Expiry of queued requests: by deadline, or by the timeout of their class's queue policy.

A queue timeout ends when the request's batch is dispatched. By its deadline the request must be answered.
"""

from __future__ import annotations

import heapq
import math
import threading
from collections.abc import Sequence
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

    __slots__ = ("_backlog", "_devices", "_due", "timeouts", "wait_until")

    def __init__(
        self, lock: threading.Lock, backlog: Backlog, devices: Devices, policies: Sequence[QueuePolicy]
    ) -> None:
        self._backlog = backlog
        self._devices = devices
        # None if no class has a queue policy.
        self.timeouts = TimeoutHeap(policies) if policies else None
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
        if due >= self.wait_until:
            return
        for device in self._devices.each:
            if device.waiting and not device.batches_outstanding:
                return
        self._due.notify()
        self.wait_until = -math.inf

    def queued(self, requests: Sequence[Request]) -> None:
        """Note a request that was queued, or the parts of one, if there are timeouts; else `notify_by` does."""
        assert self.timeouts is not None
        for request in requests:
            self.timeouts.add(request)
        self.notify_by(min(requests[0].deadline, self.timeouts.next()))

    def requeued(self, requests: Sequence[Request]) -> None:
        """Note requests that are queued again: their timeouts ended when they were dispatched."""
        if self.timeouts is not None:
            self.timeouts.forget(requests)

    def next(self, now: float) -> float:
        """Return when the first queued request times out or can no longer meet its deadline; inf for never."""
        return min(self._backlog.next_infeasible(now), self.next_timeout())

    def next_timeout(self) -> float:
        """Return when the first queued request times out; inf for never."""
        return math.inf if self.timeouts is None else self.timeouts.next()

    def timed_out(self, now: float) -> list[Request]:
        """Return the queued requests that fail by their queue timeout; move those whose policy only delays them."""
        failed: list[Request] = []
        if self.timeouts is not None:
            for request in self.timeouts.take(now):
                if self.timeouts.policy(request).delays:
                    self._backlog.move(request, request.rank + 1)
                else:
                    request.timed_out = True
                    failed.append(request)
        return failed


class TimeoutHeap:
    """The queued requests that have a queue timeout, the earliest first. Guarded by the queue's lock."""

    __slots__ = ("_heap", "_numbers", "_policies", "_purge_size")

    def __init__(self, policies: Sequence[QueuePolicy]) -> None:
        self._policies = tuple(policies)
        self._heap: list[tuple[float, int, Request]] = []
        self._numbers = count()
        self._purge_size = _MIN_PURGE_SIZE

    def policy(self, request: Request) -> QueuePolicy:
        """Return the policy of a request's class."""
        return self._policies[request.priority - 1]

    def add(self, request: Request) -> None:
        """Add a request that was queued, unless it has no timeout."""
        policy = self.policy(request)
        timeout = min(policy.timeout, request.max_queue_time) if policy.overridable else policy.timeout
        if timeout == math.inf:
            return
        if len(self._heap) >= self._purge_size:
            # Most requests are dispatched long before their timeout.
            self._heap = [entry for entry in self._heap if entry[2].state is QUEUED]
            heapq.heapify(self._heap)
            self._purge_size = max(_MIN_PURGE_SIZE, _PURGE_GROWTH * len(self._heap))
        heapq.heappush(self._heap, (request.arrival + timeout, next(self._numbers), request))

    def next(self) -> float:
        """Return when the first request that is still queued times out; inf for never."""
        heap = self._heap
        while heap and heap[0][2].state is not QUEUED:
            heapq.heappop(heap)
        return heap[0][0] if heap else math.inf

    def take(self, now: float) -> list[Request]:
        """Remove and return the queued requests whose timeout has passed."""
        over = []
        while self.next() <= now:
            over.append(heapq.heappop(self._heap)[2])
        return over

    def forget(self, requests: Sequence[Request]) -> None:
        """Remove the timeouts of these requests."""
        gone = set(map(id, requests))
        self._heap = [entry for entry in self._heap if id(entry[2]) not in gone]
        heapq.heapify(self._heap)
