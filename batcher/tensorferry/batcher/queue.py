"""The queue: admission, buckets, what was learned of them, expiry, cancellation, and who is idle.

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
from functools import partial
from itertools import count

from tensorferry.batcher.bucket import Bucket, Profile
from tensorferry.batcher.clock import Clock
from tensorferry.batcher.demand import DemandMeter
from tensorferry.batcher.errors import BatcherClosed, DeadlineExceeded, QueueFull, RequestTooLarge
from tensorferry.batcher.latency import LatencyModel
from tensorferry.batcher.policy import (
    Close,
    CloseReason,
    Limits,
    Wait,
    decide,
    form_batch,
    infeasible,
    riders,
)
from tensorferry.batcher.request import Request, State
from tensorferry.batcher.returners import Returners

# A bucket is due when its oldest request has waited for so many full batches, or so many seconds
# as long as a batch's time is not known; so no bucket and no request without deadline starves.
_AGING_BATCHES = 8
_AGING_SECONDS = 1.0
# What is learned of a bucket is kept for so many of them, the last used.
_PROFILES = 256


@dataclass(frozen=True, slots=True)
class Work:
    """What a worker has to do: complete the expired and the shed, run the batch (which may be empty).

    The expired could not make their deadlines any more; the shed were dropped so that others
    can. `predicted` is how long the batch should take, in seconds; 0 when nothing is known.
    """

    batch: tuple[Request, ...]
    reason: CloseReason | None
    expired: tuple[Request, ...]
    shed: tuple[Request, ...] = ()
    predicted: float = 0.0


@dataclass(frozen=True, slots=True)
class QueueSizes:
    """A moment's sizes: requests and rows queued, requests running, bytes held by both."""

    queued: int
    queued_rows: int
    running: int
    held_bytes: int


class RequestQueue:
    """The requests that were accepted and are not done. Every method is thread-safe.

    `max_rows` bounds the rows queued, `max_bytes` the bytes of all accepted requests that
    are not done, running ones included: they are held in memory just the same.
    """

    def __init__(
        self,
        limits: Limits,
        max_rows: int,
        max_bytes: int,
        clock: Clock,
        *,
        workers: int = 1,
        returners: Returners | None = None,
    ) -> None:
        self._limits = limits
        self._max_rows = max_rows
        self._max_bytes = max_bytes
        self._clock = clock
        self._workers = workers
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
        self._profiles: OrderedDict[Hashable, Profile] = OrderedDict()
        self._anchors: list[tuple[int, float]] = []
        self._returners = returners or Returners()
        # Of all buckets together: they share the device that must keep up with it.
        self._demand = DemandMeter()
        self._numbers = count(1)
        self._queued = 0
        self._queued_rows = 0
        self._running = 0
        self._held_bytes = 0
        self._idle_workers = 0
        # Those that took work and have not yet run and completed all of it, and when they are
        # expected to have, by the first request of their batch.
        self._busy_workers = 0
        self._busy_until: dict[Request, float] = {}
        # Until when an idle worker waits for returners; -inf when none does.
        self._returners_until = -math.inf
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

    def anchor(self, rows: int, seconds: float) -> None:
        """A warm-up run of so many rows: what every bucket's latency model starts from.

        For models whose buckets all cost the same, that is, which have no other axis that varies.
        """
        with self._lock:
            self._anchors.append((rows, seconds))

    def put(self, requests: Sequence[Request]) -> None:
        """Accepts the requests, all or none.

        RequestTooLarge when they can never fit, QueueFull when they do not fit now,
        DeadlineExceeded when one could not make its deadline even if it ran alone as soon as
        a worker is free, BatcherClosed when the queue closes; then none was accepted.
        """
        rows = sum(request.cost for request in requests)
        nbytes = sum(request.nbytes for request in requests)
        self.check_size(rows, nbytes)
        with self._lock:
            if self._closing:
                raise BatcherClosed("the batcher is draining or closed and accepts no new requests")
            now = self._clock.now()
            if self._queued_rows + rows > self._max_rows:
                self._refuse_locked(
                    f"{self._queued_rows} of {self._max_rows} rows wait, the request has {rows}"
                )
            if self._held_bytes + nbytes > self._max_bytes:
                held = f"it holds {self._held_bytes} of {self._max_bytes} bytes"
                self._refuse_locked(f"{held}, the request has {nbytes}")
            for request in requests:
                self._check_feasible_locked(request, now)
            # First: whether a batch goes on waiting depends on who is back by now.
            self._returners.arrived(now)
            wake = False
            for request in requests:
                wake = self._enqueue_locked(request, now) or wake
            self._queued += len(requests)
            self._queued_rows += rows
            self._held_bytes += nbytes
            if wake and self._idle_workers:
                self._work_ready.notify()

    def _refuse_locked(self, why: str) -> None:
        retry_after = self._drain_time_locked()
        raise QueueFull(f"the queue is full: {why}; retry in {retry_after:.3f} s", retry_after)

    def drain_time(self) -> float:
        """How long the queue as it is takes to drain, in seconds; at least a millisecond."""
        with self._lock:
            return self._drain_time_locked()

    def _drain_time_locked(self) -> float:
        seconds = 0.0
        for bucket in self._buckets.values():
            batches = math.ceil(bucket.rows / self._limits.max_batch_size)
            seconds += batches * bucket.profile.times.mean(min(bucket.rows, self._limits.max_batch_size))
        return max(0.001, seconds / self._workers)

    def _check_feasible_locked(self, request: Request, now: float) -> None:
        if request.deadline == math.inf:
            return
        start = now
        if self._busy_workers >= self._workers and self._busy_until:
            start = max(now, min(self._busy_until.values()))
        needed = self._profile_locked(request.key).needs(request.cost, now)
        if request.deadline <= start + needed:
            left = request.deadline - now
            raise DeadlineExceeded(
                f"the deadline is {left * 1e3:.1f} ms away; alone the request would take until "
                f"{(start + needed - now) * 1e3:.1f} ms from now: allow more time"
            )

    def _enqueue_locked(self, request: Request, now: float) -> bool:
        """Puts a request into its bucket; whether an idle worker must hear of it."""
        request.arrival = now
        request.state = State.QUEUED
        request.order = (request.deadline, next(self._numbers))
        bucket = self._buckets.get(request.key)
        new = bucket is None
        if bucket is None:
            profile = self._profile_locked(request.key)
            full = _AGING_BATCHES * profile.times.mean(self._limits.max_batch_size)
            bucket = self._buckets[request.key] = Bucket(profile, full or _AGING_SECONDS)
        bucket.add(request)
        self._demand.arrived(now, request.cost, request.deadline - now)
        if new or bucket.rows >= self._limits.max_batch_size:
            return True
        if self._returners_until > -math.inf:
            # Decided here, where it is known, rather than by waking the worker for each.
            return self._returners_wait_locked(bucket, now) < self._returners_until - 100e-6
        # A worker that waits out a window must hear of an expiry before its end.
        return self._limits.max_queue_delay > 0 and request.deadline < math.inf

    def _profile_locked(self, key: Hashable) -> Profile:
        profile = self._profiles.get(key)
        if profile is None:
            profile = self._profiles[key] = Profile(LatencyModel(self._limits.max_batch_size))
            for rows, seconds in self._anchors:
                profile.times.anchor(rows, seconds)
            if len(self._profiles) > _PROFILES:
                self._profiles.popitem(last=False)
        else:
            self._profiles.move_to_end(key)
        return profile

    def take(self) -> Work | None:
        """Waits for work and hands it out; None when the queue is closed and empty.

        Who has run and completed the work says so with `ran`.
        """
        with self._lock:
            while True:
                step = self._poll_locked()
                if not isinstance(step, Wait):
                    return step
                self._idle_workers += 1
                try:
                    self._clock.wait(self._work_ready, step.until)
                finally:
                    self._idle_workers -= 1
                    self._returners_until = -math.inf

    def poll(self) -> Work | Wait | None:
        """What `take` would do now, without waiting: for those who live in virtual time."""
        with self._lock:
            return self._poll_locked()

    def _poll_locked(self) -> Work | Wait | None:
        now = self._clock.now()
        dead = self._expire_locked(now)
        decision = decide(self._buckets, now, self._limits, self._closing)
        if isinstance(decision, Close):
            bucket = self._buckets[decision.key]
            if decision.reason is CloseReason.IDLE and not self._closing:
                until = self._returners_wait_locked(bucket, now)
                if until > now and not dead:
                    self._returners_until = until
                    return Wait(until)
            return self._close_locked(bucket, decision.reason, now, dead)
        if dead:
            return self._hand_out_locked(Work((), None, tuple(dead)))
        if self._closing and not self._queued:
            return None
        return decision

    def _returners_wait_locked(self, bucket: Bucket, now: float) -> float:
        """Until when it pays to wait for callers that were just answered; `now` when it does not."""
        times = bucket.profile.times
        room = self._limits.max_batch_size - bucket.rows
        if len(self._buckets) > 1 or not times.known or room <= 0:
            return now
        until = self._returners.wait_until(now, len(bucket), times.mean, room)
        return min(until, bucket.latest_start)

    def _close_locked(self, bucket: Bucket, reason: CloseReason, now: float, dead: Sequence[Request]) -> Work:
        profile = bucket.profile
        if bucket.dated:
            patient = riders(bucket.patient, self._limits.max_batch_size)
            demand = self._demand.demand(now, self._workers)
            batch, shed = form_batch(
                bucket.dated, patient, now, self._limits, profile.times, demand, bucket.aging
            )
        else:
            batch, shed = riders(bucket.patient, self._limits.max_batch_size), []
        for request in shed:
            self._dequeue_locked(request)
            self._done_locked(request)
        for request in batch:
            self._dequeue_locked(request)
            request.state = State.RUNNING
            request.started = now
        self._running += len(batch)
        predicted = profile.times.mean(sum(request.cost for request in batch))
        self._busy_until[batch[0]] = now + predicted
        return self._hand_out_locked(Work(tuple(batch), reason, tuple(dead), tuple(shed), predicted))

    def _hand_out_locked(self, work: Work) -> Work:
        self._busy_workers += 1
        # Another must now wait for what this one leaves behind, be it only for a window's end.
        if self._buckets and self._idle_workers:
            self._work_ready.notify()
        return work

    def ran(self, batch: Sequence[Request], seconds: float | None) -> None:
        """The work that a worker took is run and completed; the batch took `seconds`.

        `seconds` is None when that says nothing of how long such a batch takes: it failed, or
        there was none.
        """
        with self._lock:
            self._busy_workers -= 1
            if batch:
                self._busy_until.pop(batch[0], None)
                self._returners.answered(self._clock.now(), len(batch))
            if batch and seconds is not None:
                rows = sum(request.cost for request in batch)
                profile = self._profile_locked(batch[0].key)
                profile.observed = self._clock.now()
                profile.times.observe(min(rows, self._limits.max_batch_size), seconds)
            self._tell_if_done_locked()

    def _expire_locked(self, now: float) -> list[Request]:
        """Takes out the requests that cannot make their deadlines any more."""
        dead: list[Request] = []
        for bucket in list(self._buckets.values()):
            profile = bucket.profile
            # The usual case: the earliest has time for a full batch, so all have for their own.
            if now + profile.needs(self._limits.max_batch_size, now) < bucket.earliest_deadline:
                continue
            gone = infeasible(bucket.dated, now, partial(profile.needs, now=now))
            for request in gone:
                self._dequeue_locked(request)
                self._done_locked(request)
            dead += gone
        return dead

    def _dequeue_locked(self, request: Request) -> None:
        bucket = self._buckets[request.key]
        bucket.remove(request)
        if not bucket:
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
            queued = [request for bucket in self._buckets.values() for request in bucket]
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
