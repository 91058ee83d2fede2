"""The states of a queue's requests after their arrival: they are dispatched, end, or are queued again.

Every change of a request's state but its arrival is made here, under the queue's one lock. So exactly one of two racing
events, such as a cancel and an answer, finds the request alive.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Sequence

from tensorferry.batcher.clock import Clock, wait_for
from tensorferry.batcher.queue.admission import Admission
from tensorferry.batcher.queue.backlog import Backlog
from tensorferry.batcher.queue.devices import Devices
from tensorferry.batcher.queue.expiry import Expiry
from tensorferry.batcher.request import DONE, QUEUED, RUNNING, BatchAssignment, Request


class RequestStates:
    """The requests that run or have ended, and the threads that complete them. Guarded by the queue's lock.

    `running` counts requests whose batch was dispatched and that are not done. A thread that is given requests, by a dispatch
    or by `hand_out`, is busy until it calls `completed`. When nothing is queued and no thread is busy, the queue is drained.
    `expired` has requests that a thread has expired and not handed out yet: if the thread crashes, another hands them out.
    """

    def __init__(
        self, lock: threading.Lock, backlog: Backlog, devices: Devices, admission: Admission, expiry: Expiry
    ) -> None:
        self._backlog = backlog
        self._devices = devices
        self._admission = admission
        self._expiry = expiry
        self.running = 0
        self.busy = 0
        self.expired: list[Request] = []
        # Nothing is accepted any more.
        self.closing = False
        # Nothing is queued again after a failure: no worker may be left to run it.
        self._abandoned = False
        # `_drainers` threads wait for it.
        self._drained = threading.Condition(lock)
        self._drainers = 0

    # Dispatch.

    def dispatched(self, batch: Sequence[Request], now: float) -> tuple[Request, ...]:
        """Let the requests of a batch run, and hand out the expired ones with it."""
        for request in batch:
            request.state = RUNNING
            request.started = now
        self.running += len(batch)
        self.busy += 1
        expired = tuple(self.expired)
        self.expired.clear()
        return expired

    def undo_dispatch(
        self, requests: Sequence[Request], running: int, busy: int, expired: Sequence[Request]
    ) -> None:
        """Queue requests again whose dispatch has failed. The other arguments are what the fields were before."""
        self.running, self.busy = running, busy
        self.expired[:] = expired
        self.requeue(requests)

    # Ends of requests.

    def finish(self, requests: Iterable[Request]) -> list[Request]:
        """End the requests of a batch, and return those that were alive."""
        alive: list[Request] = []
        for request in requests:
            if request.state is RUNNING:
                request.state = DONE
                alive.append(request)
        self.running -= len(alive)
        self._admission.released(alive)
        return alive

    def end_queued(self, request: Request) -> None:
        """End a request that is queued."""
        self._backlog.remove(request)
        self.end(request)

    def end_running(self, request: Request) -> None:
        """End a request that is running."""
        self.running -= 1
        self.end(request)

    def end(self, request: Request) -> None:
        """End a request that is neither queued nor counted as running."""
        request.state = DONE
        self._admission.released((request,))
        self._notify_if_drained()

    def end_alive(self, requests: Iterable[Request]) -> list[Request]:
        """End those of these requests that are queued or running, and return them."""
        ended: list[Request] = []
        for request in requests:
            if request.state is QUEUED:
                self.end_queued(request)
            elif request.state is RUNNING:
                self.end_running(request)
            else:
                continue
            ended.append(request)
        return ended

    def end_all_queued(self) -> list[Request]:
        """End all queued requests, and return them."""
        return self.end_alive(
            [request for bucket in self._backlog.queued_buckets.values() for request in bucket]
        )

    def expire(self, start: float, now: float) -> None:
        """End the requests that would miss their deadlines even from `start` on, or have timed out in the queue."""
        for request in self._backlog.infeasible(start, now):
            self.end_queued(request)
            self.expired.append(request)
        if self._expiry.has_timeouts:
            for request in self._expiry.timed_out(now):
                self.end_queued(request)
                self.expired.append(request)

    # Requests that are queued again.

    def requeue(self, requests: Sequence[Request]) -> None:
        """Queue requests that were taken out again."""
        for request in requests:
            request.state = QUEUED
            request.started = math.nan
        self._backlog.put_back(requests)

    def requeue_running(
        self, batch: Sequence[Request], work: BatchAssignment, now: float, *, retried: bool
    ) -> tuple[int, Sequence[Request]]:
        """Queue the running requests of a batch, all or a part of an assignment's, again, or end them.

        Returns how many were queued, and those that ended. With `retried` each request may come back once only.
        """
        requeued: list[Request] = []
        ended: list[Request] = []
        lost = self._abandoned or self._admission.unavailable
        for request in batch:
            if request.state is not RUNNING:
                continue
            if lost or request.deadline <= now or (retried and request.retried):
                self.end_running(request)
                ended.append(request)
            else:
                self.running -= 1
                request.retried = request.retried or retried
                requeued.append(request)
        if requeued:
            # Another thread may take them as soon as the lock is free.
            work.requeued.extend(requeued)
            self.requeue(requeued)
            # Their time in the queue was over when they were dispatched.
            self._expiry.requeued(requeued)
        return len(requeued), ended

    # Threads that complete requests.

    def hand_out(self, ended: Sequence[Request]) -> Sequence[Request]:
        """Return ended requests. If there are any, the calling thread is busy until it calls `completed`."""
        if ended:
            self.busy += 1
        return ended

    def hand_out_expired(self, ended: Sequence[Request] = ()) -> Sequence[Request]:
        """Hand out these ended requests, and the expired ones."""
        handed_out = [*ended, *self.expired]
        self.expired.clear()
        return self.hand_out(handed_out)

    def completed(self) -> bool:
        """Note that a thread has completed what it was given; return whether anything is queued."""
        self.busy -= 1
        if self._backlog.rows:
            return True
        self._notify_if_drained()
        return False

    # The end of the queue.

    def close(self) -> None:
        """Note that nothing is accepted any more."""
        self.closing = True

    def abandon(self) -> list[Request]:
        """End all queued requests, return them, and queue none again after a failure."""
        self._abandoned = True
        return self.end_all_queued()

    def wait_drained(self, clock: Clock, until: float) -> bool:
        """Wait until the queue is drained, at most until `until`; return whether it is."""
        self._drainers += 1
        try:
            return wait_for(clock, self._drained, lambda: not (self._backlog.rows or self.busy), until)
        finally:
            self._drainers -= 1

    def _notify_if_drained(self) -> None:
        """Wake the threads that wait for the end, if nothing is queued."""
        if self._backlog.rows or not (self._drainers or self.closing):
            return
        if self._drainers and not self.busy:
            self._drained.notify_all()
        if self.closing:
            self._expiry.notify()
            self._devices.recovered_or_closed.notify_all()
