"""The queue: admission by rows and bytes, buckets, expiry, cancellation, and who is idle.

Decisions are made under the lock and returned as records; the caller completes requests.
Every change of a request's state happens here, under the one lock, so that of two racing
events (a cancel and an answer, say) exactly one finds the request still alive.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from tensorferry.batcher.clock import Clock
from tensorferry.batcher.errors import BatcherClosed, QueueFull, RequestTooLarge
from tensorferry.batcher.policy import Close, CloseReason, Limits, Wait, decide, expired, riders
from tensorferry.batcher.request import Request, State


@dataclass(frozen=True, slots=True)
class Work:
    """What a worker has to do: complete the expired, run the batch (which may be empty)."""

    batch: tuple[Request, ...]
    reason: CloseReason | None
    expired: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class QueueSizes:
    """A moment's sizes: requests and rows queued, requests running, bytes held by both."""

    queued: int
    queued_rows: int
    running: int
    held_bytes: int


class Bucket:
    """The queued requests of one key, in order of arrival. Guarded by the queue's lock."""

    __slots__ = ("earliest_deadline", "requests", "rows")

    def __init__(self) -> None:
        # Ordered, with removal of any one request in constant time: cancels are common.
        self.requests: OrderedDict[Request, None] = OrderedDict()
        self.rows = 0
        # Never later than the earliest; it may be earlier, after a request has left.
        self.earliest_deadline = math.inf

    @property
    def oldest_arrival(self) -> float:
        """The arrival of the first request."""
        return next(iter(self.requests)).arrival

    def add(self, request: Request) -> None:
        """Appends a request."""
        self.requests[request] = None
        self.rows += request.cost
        self.earliest_deadline = min(self.earliest_deadline, request.deadline)

    def remove(self, request: Request) -> None:
        """Takes a request out."""
        del self.requests[request]
        self.rows -= request.cost


class RequestQueue:
    """The requests that were accepted and are not done. Every method is thread-safe.

    `max_rows` bounds the rows queued, `max_bytes` the bytes of all accepted requests that
    are not done, running ones included: they are held in memory just the same.
    """

    def __init__(self, limits: Limits, max_rows: int, max_bytes: int, clock: Clock) -> None:
        self._limits = limits
        self._max_rows = max_rows
        self._max_bytes = max_bytes
        self._clock = clock
        # Guards every field below, and the state of every request that passes through here.
        # While it is held nothing is run, completed, logged or waited for, but for the two
        # conditions, which share it. Methods that need it held end in `_locked`.
        self._lock = threading.Lock()
        # A batch may leave, a request has expired, or the queue closes. Waited for by idle
        # workers; notified by put, and by take when it leaves work behind.
        self._work_ready = threading.Condition(self._lock)
        # Nothing is queued and no worker is busy. Waited for by drain; notified by whoever ends it.
        self._all_done = threading.Condition(self._lock)
        self._buckets: dict[Hashable, Bucket] = {}
        self._queued = 0
        self._queued_rows = 0
        self._running = 0
        self._held_bytes = 0
        self._idle_workers = 0
        # Those that took work and have not yet run and completed all of it.
        self._busy_workers = 0
        self._closing = False

    def check_size(self, rows: int, nbytes: int) -> None:
        """RequestTooLarge when so many rows or bytes could never be accepted."""
        if rows > self._max_rows:
            raise RequestTooLarge(
                f"the request has {rows} rows; the queue holds {self._max_rows}: send fewer rows at once"
            )
        if nbytes > self._max_bytes:
            raise RequestTooLarge(
                f"the request has {nbytes} bytes; the queue holds {self._max_bytes}: send less at once"
            )

    def put(self, requests: Sequence[Request], retry_after: float) -> None:
        """Accepts the requests, all or none.

        RequestTooLarge when they can never fit, QueueFull (with `retry_after`) when they do
        not fit now, BatcherClosed when the queue closes; then none was accepted.
        """
        rows = sum(request.cost for request in requests)
        nbytes = sum(request.nbytes for request in requests)
        self.check_size(rows, nbytes)
        with self._lock:
            if self._closing:
                raise BatcherClosed("the batcher is draining or closed and accepts no new requests")
            if self._queued_rows + rows > self._max_rows:
                raise QueueFull(
                    f"the queue is full: {self._queued_rows} of {self._max_rows} rows wait, the request has {rows}; "
                    f"retry in {retry_after:.3f} s",
                    retry_after,
                )
            if self._held_bytes + nbytes > self._max_bytes:
                raise QueueFull(
                    f"the queue is full: it holds {self._held_bytes} of {self._max_bytes} bytes, the request has {nbytes}; "
                    f"retry in {retry_after:.3f} s",
                    retry_after,
                )
            now = self._clock.now()
            wake = False
            for request in requests:
                request.arrival = now
                request.state = State.QUEUED
                bucket = self._buckets.get(request.key)
                if bucket is None:
                    bucket = self._buckets[request.key] = Bucket()
                    wake = True
                bucket.add(request)
                # A worker that waits out a window must hear of an expiry before its end.
                wake = wake or bucket.rows >= self._limits.max_batch_size or request.deadline < math.inf
            self._queued += len(requests)
            self._queued_rows += rows
            self._held_bytes += nbytes
            if wake and self._idle_workers:
                self._work_ready.notify()

    def take(self) -> Work | None:
        """Waits for work and hands it out; None when the queue is closed and empty.

        Who has run and completed the work says so with `worker_done`.
        """
        with self._lock:
            while True:
                now = self._clock.now()
                dead = self._expire_locked(now)
                decision = decide(self._buckets, now, self._limits, self._closing)
                if dead or isinstance(decision, Close):
                    return self._hand_out_locked(decision, now, dead)
                if self._closing and not self._queued:
                    return None
                self._idle_workers += 1
                try:
                    self._clock.wait(self._work_ready, decision.until)
                finally:
                    self._idle_workers -= 1

    def _hand_out_locked(self, decision: Close | Wait, now: float, dead: Iterable[Request]) -> Work:
        batch: list[Request] = []
        reason = None
        if isinstance(decision, Close):
            batch, reason = riders(self._buckets[decision.key].requests, self._limits), decision.reason
        for request in batch:
            self._dequeue_locked(request)
            request.state = State.RUNNING
            request.started = now
        self._running += len(batch)
        self._busy_workers += 1
        # Another must now wait for what this one leaves behind, be it only for a window's end.
        if self._buckets and self._idle_workers:
            self._work_ready.notify()
        return Work(tuple(batch), reason, tuple(dead))

    def worker_done(self) -> None:
        """The work that a worker took is run and completed."""
        with self._lock:
            self._busy_workers -= 1
            self._tell_if_done_locked()

    def _expire_locked(self, now: float) -> list[Request]:
        dead: list[Request] = []
        for bucket in [bucket for bucket in self._buckets.values() if bucket.earliest_deadline <= now]:
            gone = expired(bucket.requests, now)
            for request in gone:
                self._dequeue_locked(request)
                self._done_locked(request)
            bucket.earliest_deadline = min(
                (request.deadline for request in bucket.requests), default=math.inf
            )
            dead += gone
        return dead

    def _dequeue_locked(self, request: Request) -> None:
        bucket = self._buckets[request.key]
        bucket.remove(request)
        if not bucket.requests:
            del self._buckets[request.key]
        self._queued -= 1
        self._queued_rows -= request.cost

    def _done_locked(self, request: Request) -> None:
        request.state = State.DONE
        self._held_bytes -= request.nbytes
        self._tell_if_done_locked()

    def _tell_if_done_locked(self) -> None:
        if not self._queued and not self._busy_workers:
            self._all_done.notify_all()

    def still_running(self, requests: Iterable[Request]) -> list[Request]:
        """Those of a batch's requests that nobody has cancelled since it left."""
        with self._lock:
            return [request for request in requests if request.state is State.RUNNING]

    def finish(self, requests: Iterable[Request]) -> list[Request]:
        """Ends running requests; returns those that were still alive, which the caller completes."""
        with self._lock:
            alive = [request for request in requests if request.state is State.RUNNING]
            for request in alive:
                self._running -= 1
                self._done_locked(request)
            return alive

    def cancel(self, request: Request) -> bool:
        """Ends a request that is queued or running; True when the caller is to complete it."""
        with self._lock:
            if request.state is State.QUEUED:
                self._dequeue_locked(request)
            elif request.state is State.RUNNING:
                self._running -= 1
            else:
                return False
            self._done_locked(request)
            return True

    def close(self) -> None:
        """Accepts nothing from now on; what is queued still runs. Idempotent."""
        with self._lock:
            self._closing = True
            self._work_ready.notify_all()

    def abandon(self) -> list[Request]:
        """Ends every request, queued or not yet finished queueing; the caller completes them."""
        with self._lock:
            queued = [request for bucket in self._buckets.values() for request in bucket.requests]
            for request in queued:
                self._dequeue_locked(request)
                self._done_locked(request)
            self._work_ready.notify_all()
            return queued

    def wait_done(self, until: float) -> bool:
        """Waits until nothing is queued and no worker busy, at most to `until`; whether that came about."""
        with self._lock:
            while self._queued or self._busy_workers:
                if self._clock.now() >= until:
                    return False
                self._clock.wait(self._all_done, until)
            return True

    def sizes(self) -> QueueSizes:
        """The sizes at this moment."""
        with self._lock:
            return QueueSizes(self._queued, self._queued_rows, self._running, self._held_bytes)
