"""Expiry: the queued requests whose time is over, and who looks after them while no worker is free to."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence

from tensorferry.batcher.queue.backlog import Backlog
from tensorferry.batcher.queue.devices import Devices
from tensorferry.batcher.queue.timeouts import TimeoutHeap
from tensorferry.batcher.request import Request
from tensorferry.batcher.settings import QueuePolicy


class Expiry:
    """Guarded by the queue's lock, on which `due` is built: waited for by whoever takes the expired.

    A request's time is over when it cannot make its deadline any more, or has been queued for as long as
    the policy of its class allows. `policies` has one for each class, or none at all; `end` ends a queued
    request.
    """

    __slots__ = ("_backlog", "_devices", "_end", "at", "due", "needed", "timeouts")

    def __init__(
        self,
        due: threading.Condition,
        backlog: Backlog,
        devices: Devices,
        policies: Sequence[QueuePolicy],
        end: Callable[[Request], None],
    ) -> None:
        self._backlog = backlog
        self._devices = devices
        self._end = end
        self.timeouts = TimeoutHeap(policies) if policies else None
        # Requests may time out, or one had a deadline. Before, there is nothing to do here.
        self.needed = bool(policies)
        # Some queued request's time is over, and no idle worker is there to see it. Waited for until `at`.
        self.due = due
        self.at = math.inf

    def watch(self, due: float) -> None:
        """Sees to it that somebody looks after the deadlines from `due` on, while no worker is free to."""
        if due < self.at and not self._devices.attended():
            self.due.notify()

    def queued(self, requests: Sequence[Request]) -> None:
        """A request is queued, or the parts of one."""
        due = requests[0].deadline
        if self.timeouts is not None:
            for request in requests:
                self.timeouts.add(request)
            due = min(due, self.timeouts.next())
        if due < self.at:
            self.watch(due)

    def next(self, now: float) -> float:
        """When the first of those queued times out, or cannot make its deadline any more; inf for never."""
        due = self._backlog.next_infeasible(now)
        return due if self.timeouts is None else min(due, self.timeouts.next())

    def next_timeout(self) -> float:
        """When the first of those queued times out; inf for never."""
        return math.inf if self.timeouts is None else self.timeouts.next()

    def take(self, start: float, now: float) -> Sequence[Request]:
        """Ends the requests that cannot make their deadlines any more, were they run from `start` on.

        And those whose time in the queue is over, but for those that are only delayed. The caller completes
        them.
        """
        dead = self._backlog.infeasible(start, now)
        for request in dead:
            self._end(request)
        if self.timeouts is not None:
            for request in self.timeouts.take(now):
                if self.timeouts.policy(request).delays:
                    self._backlog.move(request, request.rank + 1)
                else:
                    request.timed_out = True
                    self._end(request)
                    dead.append(request)
        return dead
