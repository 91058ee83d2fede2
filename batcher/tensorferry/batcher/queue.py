"""The queue: admission, who is woken, expiry, cancellation, and what is in flight.

Decisions are made under the lock and returned as records; the caller completes requests.
Every change of a request's state happens here, under the one lock, so that of two racing
events (a cancel and an answer, say) exactly one finds the request still alive.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import partial
from itertools import count

from tensorferry.batcher.admission import Admission
from tensorferry.batcher.backlog import Backlog
from tensorferry.batcher.bucket import Bucket
from tensorferry.batcher.clock import Clock
from tensorferry.batcher.company import Company
from tensorferry.batcher.demand import DemandMeter
from tensorferry.batcher.device import Device, Devices
from tensorferry.batcher.errors import BatcherClosed, InstanceFailed, QueueFull
from tensorferry.batcher.memory import RowLimits
from tensorferry.batcher.outages import Outages
from tensorferry.batcher.policy import Close, CloseReason, Limits, Wait, decide
from tensorferry.batcher.profile import BucketStatistics
from tensorferry.batcher.request import DONE, QUEUED, RUNNING, Request
from tensorferry.batcher.returners import Returners, ReturnersStatistics
from tensorferry.batcher.riding import Demand, form_batch
from tensorferry.batcher.shares import Ranks, Shares
from tensorferry.batcher.statistics import QueueSizes
from tensorferry.batcher.timeouts import QueuePolicy, Timeouts
from tensorferry.batcher.work import Work

_INF = math.inf

# For what is done for each batch: to look a member up costs more.
_IDLE = CloseReason.IDLE

_new = tuple.__new__

# Some models' time depends on their inputs' values. After a batch that kept the device for this long,
# in seconds, none is expected to be short for a while, whatever is usual.
_LONG_SECONDS = 0.02
_UNSTEADY_SECONDS = 60.0


class RequestQueue(Outages):
    """The requests that were accepted and are not done. Every method is thread-safe.

    `max_rows` bounds the rows queued, `max_bytes` the bytes of all accepted requests that
    are not done, running ones included: they are held in memory just the same. Each of
    `devices` has one worker that takes work for it, two if `pipelined`. `weights` are those of
    the priority classes, the highest first; if `strict`, each rides before all lower ones instead. `policies`
    has one for each class, or none at all. `steady` says that a batch's time depends on its shape
    alone: only then others than workers may run it.
    """

    def __init__(
        self,
        limits: Limits,
        max_rows: int,
        max_bytes: int,
        clock: Clock,
        *,
        devices: int = 1,
        pipelined: bool = False,
        weights: Sequence[int] = (1,),
        strict: bool = False,
        policies: Sequence[QueuePolicy] = (),
        steady: bool = True,
        returners: Returners | None = None,
    ) -> None:
        self._limits = limits
        self._clock = clock
        self._pipelined = pipelined
        # Guards every field below and the state of every request in here. Nothing is completed,
        # run, joined, logged or waited for (but by the conditions) while it is held.
        self._lock = threading.Lock()
        self._devices = Devices(self._lock, devices)
        # A queued request cannot make its deadline any more, and no idle worker is there to see
        # it. Waited for by whoever takes the expired, until `_expiry_at`.
        self._expiry = threading.Condition(self._lock)
        self._expiry_at = math.inf
        # Nothing is queued and no worker is busy. Waited for by drain; notified by whoever ends it.
        self._all_done = threading.Condition(self._lock)
        # How many ranks a class has: those who have timed out and are delayed are one below the others.
        self.ranks = 2 if any(policy.delays and policy.expires for policy in policies) else 1
        ranks = self.ranks * len(weights)
        self._timeouts = Timeouts(policies) if policies else None
        self._backlog = Backlog(limits, ranks, pipelined=pipelined)
        self._admission = Admission(self._backlog, max_rows, max_bytes, devices)
        ranked = strict or self.ranks > 1
        self._shares: Ranks | Shares = Ranks(ranks) if ranked else Shares(weights, limits.max_batch_size)
        # By class, of all buckets together: they share the device that must keep up with it.
        self._demand = [DemandMeter() for _ in range(ranks)]
        self._numbers = count(1)
        self._accepted = 0
        self._running = 0
        self._held_bytes = 0
        # Threads that took work, or the expired, and have not yet run and completed all of it.
        self._busy_workers = 0
        # Threads that wait for work.
        self._waiting_workers = 0
        # One device runs one batch at a time, and none waits for a window's end.
        simple = devices == 1 and not pipelined and not limits.max_queue_delay
        self.company = Company(returners or Returners(), hears=simple)
        # Until when an idle worker waits for company, and for which device; -inf when none does.
        self._company_until = -math.inf
        self._company_for: Device | None = None
        # Whether somebody other than a worker may run batches.
        self._lends = simple and steady
        # Threads that wait for `_all_done`.
        self._drainers = 0
        # A batch took much longer than any short one: until then workers run them all.
        self._unsteady_until = -_INF
        self._closing = False
        # Empty as long as every batch fits.
        self._row_limits = RowLimits(limits.max_batch_size)
        self._no_outages()

    def check_size(self, rows: int, nbytes: int) -> None:
        """RequestTooLarge when so many rows or bytes could never be accepted."""
        self._admission.check_size(rows, nbytes)

    def anchor(self, rows: int, seconds: float, key: Hashable = None) -> None:
        """A warm-up run of so many rows: what the latency model of the key's bucket starts from.

        Without a key that of every bucket, where they all cost the same.
        """
        with self._lock:
            self._backlog.anchor(rows, seconds, key)

    def put(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Accepts the requests, all or none; they are of one class.

        RequestTooLarge when they can never fit, QueueFull when they do not fit now,
        DeadlineExceeded when one could not make its deadline even if it ran alone as soon as
        a device is free, BatcherClosed when the queue closes, InstanceFailed when no device works;
        then none was accepted. Returns
        requests of lower classes that were dropped to make room: the caller completes them.
        """
        with self._lock:
            displaced, wake = self._put_locked(requests)
            self.company.put(quietly=False)
            if wake:
                self._wake_locked(self._clock.now())
            return displaced

    def put_quietly(self, requests: Sequence[Request]) -> tuple[Sequence[Request], bool]:
        """As `put`, but wakes no worker: when true is returned, `take_short` must be called soon."""
        with self._lock:
            answer = self._put_locked(requests)
            self.company.put(quietly=True)
            return answer

    def _put_locked(self, requests: Sequence[Request]) -> tuple[Sequence[Request], bool]:
        """Puts the requests into their buckets; whether a waiting worker must hear of it."""
        first, admission = requests[0], self._admission
        rows, nbytes = first.cost, first.nbytes
        if len(requests) > 1:
            rows = sum([request.cost for request in requests])
            nbytes = sum([request.nbytes for request in requests])
        displaced: Sequence[Request] = ()
        roomy = admission.has_room(rows, nbytes, self._held_bytes)
        if not roomy:
            admission.check_size(rows, nbytes)
        if self._closing:
            raise BatcherClosed("the batcher is draining or closed and accepts no new requests")
        if self._broken is not None:
            raise InstanceFailed(str(self._broken), self._broken.retry_after)
        now = self._clock.now()
        if self._timeouts is not None:
            self._check_policy_locked(self._timeouts.policy(first), first)
        if not roomy:
            displaced = admission.make_room(first.level, rows, nbytes, self._held_bytes)
        if first.deadline < _INF:
            start = self._devices.next_start(now)
            for request in requests:
                admission.check_feasible(request, start, now)
        self._accepted += 1
        for request in displaced:
            self._end_queued_locked(request)
        # First: whether a batch goes on waiting depends on who is back by now.
        self.company.returners.arrived(now)
        wake = False
        for request in requests:
            bucket = self._enqueue_locked(request, now)
            # Under load nobody waits, and this is not asked.
            if self._waiting_workers or self._company_for is not None:
                wake = self._wakes_locked(request, bucket, now) or wake
        self._held_bytes += nbytes
        if first.deadline < self._expiry_at:
            self._watch_locked(first.deadline)
        if self._timeouts is not None and (due := self._timeouts.next()) < self._expiry_at:
            self._watch_locked(due)
        return displaced, wake

    def _check_policy_locked(self, policy: QueuePolicy, request: Request) -> None:
        """QueueFull when as many requests of its class are queued as may be."""
        if not policy.max_requests:
            return
        queued = self._backlog.requests(range(request.level, request.level + self.ranks))
        if queued >= policy.max_requests:
            retry_after = self._admission.drain_time()
            raise QueueFull(
                f"{queued} requests of priority {request.priority} wait, and the model's "
                f"queue policy allows {policy.max_requests}; retry in {retry_after:.3f} s",
                retry_after,
            )

    def drain_time(self) -> float:
        """How long the queue as it is takes to drain, in seconds; at least a millisecond."""
        with self._lock:
            return self._admission.drain_time()

    def _enqueue_locked(self, request: Request, now: float) -> Bucket:
        """Puts a request into its bucket, and returns that."""
        request.arrival = now
        request.state = QUEUED
        deadline = request.deadline
        if deadline < _INF:
            request.order = (deadline, next(self._numbers))
        self._demand[request.level].arrived(now, request.cost, deadline - now)
        if self._timeouts is not None:
            self._timeouts.add(request)
        return self._backlog.add(request)

    def _wakes_locked(self, request: Request, bucket: Bucket, now: float) -> bool:
        """Whether a waiting worker must hear of a request that was put into the bucket."""
        room = self._limits.max_batch_size - bucket.rows
        if bucket.rows == request.cost or room <= 0 or self.company.awaits:
            return True
        if self._company_for is not None:
            # Decided here, where it is known, rather than by waking the worker for each.
            if len(self._backlog.buckets) > 1:
                return True
            return self.company.returners_until(bucket, now, room) < self._company_until - 100e-6
        # A worker that waits out a window must hear of an expiry before its end, and of a size
        # at which the window ends.
        return self._limits.max_queue_delay > 0 and (
            request.deadline < _INF or bool(self._limits.preferred) or self._timeouts is not None
        )

    def _wake_locked(self, now: float) -> None:
        """Wakes the worker that may take a batch the soonest, of an idle device if one waits there."""
        if self._waiting_workers:
            self._devices.wake(lambda device: max(now, self._turn_locked(device, now)))

    def take(self, device: int = 0) -> Work | None:
        """Waits for work for a device and hands it out; None when the queue is closed and empty.

        RECOVER tells to bring the device back, and to say by `recovered` or `not_recovered` whether it is. Who has run and completed the work says so with `ran`, and, when pipelined, with
        `released` as soon as the device has.
        """
        with self._lock:
            mine = self._devices.each[device]
            while True:
                if mine.outage is not None:
                    if self._closing and not self._backlog.rows:
                        return None
                    if (order := self._stand_by_locked(mine, mine.outage)) is not None:
                        return order
                    continue
                step = self._poll_locked(mine)
                if not isinstance(step, Wait):
                    return step
                mine.waiting += 1
                self._waiting_workers += 1
                until = step.until
                if self._timeouts is not None and mine.idle and not mine.unanswered:
                    # Nobody else looks after them as long as it waits.
                    until = min(until, self._timeouts.next())
                try:
                    self._clock.wait(mine.ready, until)
                finally:
                    mine.waiting -= 1
                    self._waiting_workers -= 1
                    self.company.awaits = False
                    if self._company_for is mine:
                        self._company_until, self._company_for = -math.inf, None

    def take_short(self, most_seconds: float) -> Work | float:
        """Work for the one device if its worker waits and the batch should take at most so long.

        Else until when to wait for returners before it is asked again, as a time on the clock;
        inf when there is nothing to do, or a worker was woken to do it.
        """
        with self._lock:
            self.company.heard()
            if not self._backlog.rows:
                return _INF
            mine = self._devices.each[0]
            works = self._lends and mine.outage is None
            own = works and mine.idle and mine.waiting and self._clock.now() >= self._unsteady_until
            if own and self._short_locked(most_seconds):
                step = self._poll_locked(mine)
                if isinstance(step, Work):
                    mine.borrowed = bool(step.batch)
                    return step
                if isinstance(step, Wait) and step.until < _INF:
                    return step.until
            self._wake_locked(self._clock.now())
            return _INF

    def _short_locked(self, most_seconds: float) -> bool:
        """Whether any batch that may leave now is known to keep the device for at most so long."""
        most = self._limits.max_batch_size
        for bucket in self._backlog.buckets.values():
            rows, device = bucket.rows, bucket.profile.device
            if not device.known or device.mean(rows if rows < most else most) > most_seconds:
                return False
        return True

    def poll(self, device: int = 0) -> Work | Wait | None:
        """What `take` would do now, without waiting: for those who live in virtual time."""
        with self._lock:
            return self._poll_locked(self._devices.each[device])

    def _poll_locked(self, device: Device) -> Work | Wait | None:
        now, backlog = self._clock.now(), self._backlog
        start = now
        # What left for it is unanswered at least as long as it is in flight.
        if device.unanswered:
            turn = self._turn_locked(device, now)
            if turn > now:
                if backlog.rows and not device.idle:
                    # It may have been woken instead of one that can start at once.
                    self._devices.wake_idle()
                return Wait(turn if backlog.rows else math.inf)
            start = device.starts(now)
        dead = self._expire_locked(start, now)
        self._shares.renew(backlog.class_rows)
        decision = decide(backlog.buckets, now, self._limits, self._closing, self._shares.credits)
        if isinstance(decision, Close):
            bucket = backlog.buckets[decision.key]
            if decision.reason is _IDLE and not self._closing:
                until = now
                if len(backlog.buckets) == 1:
                    most = self._limits.max_batch_size
                    if self._row_limits:
                        most = self._row_limits.rows(self._devices.each.index(device), decision.key)
                    room = most - bucket.rows
                    until = self.company.wait_until(bucket, now, room)
                if until > now and not dead:
                    self._company_until, self._company_for = until, device
                    return Wait(until)
            return self._close_locked(device, bucket, decision, now, dead)
        if dead:
            return self._hand_out_locked(Work((), None, tuple(dead)), now)
        if self._closing and not backlog.rows:
            return None
        return decision

    def _turn_locked(self, device: Device, now: float) -> float:
        """When the next batch may leave for a device whose last is unanswered.

        Where callers come back, it is asked again when those of the last batch are answered:
        before, nobody knows whether to wait for them. Unless a full batch waits anyway. And a
        device that is busy leaves the batch to one that is not.
        """
        if not device.idle and self._devices.idle_waits():
            return math.inf
        if device.borrowed:
            return _INF
        if device.unanswered and self.company.returners.expected:
            full = self._limits.full
            if all(bucket.rows < full for bucket in self._backlog.buckets.values()):
                return math.inf
        return device.turn(now)

    def _close_locked(
        self, device: Device, bucket: Bucket, close: Close, now: float, dead: Sequence[Request]
    ) -> Work:
        profile, lanes = bucket.profile, bucket.lanes
        lead, most = close.lead, close.rows
        if self._row_limits:
            most = self._row_limits.allowed(self._devices.each.index(device), close.key, most, now)
        allotted = [most]
        if len(lanes) > 1:
            allotted = self._shares.allot([lane.rows for lane in lanes], self._backlog.class_rows, most)
            # Whoever's turn it was for a batch: who has a share in it and ranks highest must not be
            # one who rides along only if its deadline allows.
            lead = next((level for level, share in enumerate(allotted) if share), lead)
        start, demand = device.starts(now), partial(self._demand_locked, lead, now)
        batch, shed, riding = form_batch(lanes, lead, allotted, start, most, profile, demand)
        gone = riding
        if shed:
            gone = list(riding)
            gone[lead] += sum([request.cost for request in shed])
        self._backlog.remove_all(close.key, shed + batch if shed else batch, gone)
        for request in shed:
            self._done_locked(request)
        for request in batch:
            request.state = RUNNING
            request.started = now
        self._running += len(batch)
        self._shares.charge(riding, lead, self._backlog.class_rows)
        rows = sum(riding)
        if self._row_limits:
            self._row_limits.left(self._devices.each.index(device), close.key, rows, now)
        whole = profile.whole(rows)
        keeps = whole
        if self._pipelined:
            device.preparation, keeps = profile.preparation(rows), profile.mean(rows)
        self._devices.left(device, now, keeps)
        # As `Work(...)`, in half the time.
        work = _new(Work, (tuple(batch), close.reason, tuple(dead), tuple(shed), whole))
        return self._hand_out_locked(work, now)

    def _demand_locked(self, lead: int, now: float) -> Demand:
        """One device's share of what a class and those above it ask for.

        That is what arrives; and after a burst what is left of it, in the time that it has.
        """
        demands = [meter.demand(now, len(self._devices.each)) for meter in self._demand[: lead + 1]]
        rate, patience = sum([demand.rate for demand in demands]), demands[lead].patience
        if patience:
            waiting = self._backlog.dated(lead) / len(self._devices.each)
            rate = max(rate, waiting / patience)
        return Demand(rate, patience)

    def _hand_out_locked(self, work: Work, now: float) -> Work:
        self._busy_workers += 1
        # Another must now wait for what this one leaves behind, be it only for a window's end.
        if self._backlog.rows:
            self._wake_locked(now)
            self._watch_locked(self._next_expiry_locked(now))
        return work

    def released(self, device: int) -> None:
        """A pipelined device has run its batch, which is yet to be completed."""
        with self._lock:
            mine = self._devices.each[device]
            self._devices.released(mine, self._clock.now())
            mine.ready.notify()

    def ran(
        self,
        batch: Sequence[Request],
        seconds: float | None,
        before: float = 0.0,
        after: float = 0.0,
        *,
        device: int = 0,
    ) -> bool:
        """The work that was taken for a device is run and completed; the device ran it for `seconds`.

        `before` it the host spent so many seconds on the batch, and so many `after` it until all
        was completed. `seconds` is None when the times say nothing of how long such a batch takes:
        it failed, or there was none. Returns whether anything is queued.
        """
        with self._lock:
            self._busy_workers -= 1
            if batch:
                now = self._clock.now()
                mine = self._devices.each[device]
                if mine.borrowed:
                    mine.borrowed = False
                    if self._closing:
                        # Its workers wait for what they have not run themselves, and may end now.
                        mine.ready.notify_all()
                mine.unanswered -= 1
                if self._pipelined:
                    mine.ready.notify()
                else:
                    self._devices.released(mine, now)
                if seconds is not None:
                    if seconds > _LONG_SECONDS:
                        self._unsteady_until = now + _UNSTEADY_SECONDS
                    rows = sum([request.cost for request in batch])
                    self._backlog.profile(batch[0].key).observe(now, rows, seconds, before, after)
                    if self._row_limits:
                        self._row_limits.fitted(device, batch[0].key, rows)
            self._tell_if_done_locked()
            return self._backlog.rows > 0

    def take_expired(self) -> Sequence[Request] | None:
        """Waits until queued requests cannot make their deadlines while no worker is free to see it.

        Hands these out, and is told by `expired_completed` when they are; None when the queue is
        closed and empty.
        """
        with self._lock:
            while not (self._closing and not self._backlog.rows):
                now, self._expiry_at = self._clock.now(), math.inf
                if not self._devices.attended():
                    if dead := self._expire_locked(now, now):
                        # Not before: were it to end the queue's work, drain would not wait for it.
                        self._busy_workers += 1
                        return dead
                    # A rounding error must not make this a busy loop.
                    self._expiry_at = max(self._next_expiry_locked(now), now + 1e-4)
                if self._expiry_at < math.inf:
                    self._clock.wait(self._expiry, self._expiry_at)
                else:
                    self._expiry.wait()
            return None

    def expired_completed(self) -> None:
        """Those that `take_expired` handed out are completed."""
        with self._lock:
            self._busy_workers -= 1
            self._tell_if_done_locked()

    def _watch_locked(self, due: float) -> None:
        """Sees to it that somebody looks after the deadlines from `due` on, while no worker is free to."""
        if due < self._expiry_at and not self._devices.attended():
            self._expiry.notify()

    def _expire_locked(self, start: float, now: float) -> list[Request]:
        """Takes out the requests that cannot make their deadlines any more, were they run from `start` on.

        And those whose time in the queue is over, but for those that are only delayed.
        """
        dead = self._backlog.infeasible(start, now)
        for request in dead:
            self._end_queued_locked(request)
        if self._timeouts is not None:
            for request in self._timeouts.take(now):
                if self._timeouts.policy(request).delays:
                    self._backlog.move(request, request.level + 1)
                else:
                    request.timed_out = True
                    self._end_queued_locked(request)
                    dead.append(request)
        return dead

    def _next_expiry_locked(self, now: float) -> float:
        """When the first of those queued times out, or cannot make its deadline any more; inf for never."""
        due = self._backlog.next_infeasible(now)
        return due if self._timeouts is None else min(due, self._timeouts.next())

    def _end_queued_locked(self, request: Request) -> None:
        self._backlog.remove(request)
        self._done_locked(request)

    def _done_locked(self, request: Request) -> None:
        request.state = DONE
        self._held_bytes -= request.nbytes
        self._tell_if_done_locked()

    def _tell_if_done_locked(self) -> None:
        if not self._backlog.rows:
            if self._drainers and not self._busy_workers:
                self._all_done.notify_all()
            if self._closing:
                self._expiry.notify()
                self._back.notify_all()

    def still_running(self, requests: Iterable[Request]) -> list[Request]:
        """Those of a batch's requests that nobody has cancelled since it left."""
        with self._lock:
            return [request for request in requests if request.state is RUNNING]

    def finish(self, requests: Iterable[Request]) -> list[Request]:
        """Ends running requests; returns those that were still alive, which the caller completes."""
        with self._lock:
            alive, nbytes = [], 0
            for request in requests:
                if request.state is RUNNING:
                    request.state = DONE
                    nbytes += request.nbytes
                    alive.append(request)
            self._held_bytes -= nbytes
            self._running -= len(alive)
            if alive:
                alone = self._backlog.profile(alive[0].key).mean(1)
                by_worker = not self._devices.each[0].borrowed
                self.company.ran(self._clock.now(), len(alive), alone, by_worker=by_worker)
            return alive

    def cancel(self, request: Request) -> bool:
        """Ends a request that is queued or running; True when the caller is to complete it."""
        with self._lock:
            if request.state is QUEUED:
                self._end_queued_locked(request)
            elif request.state is RUNNING:
                self._running -= 1
                self._done_locked(request)
            else:
                return False
            return True

    def close(self) -> None:
        """Accepts nothing from now on; what is queued still runs. Idempotent."""
        with self._lock:
            self._closing = True
            for device in self._devices.each:
                device.ready.notify_all()
            self._back.notify_all()
            self._expiry.notify()

    def abandon(self) -> list[Request]:
        """Ends every request, queued or not yet finished queueing; the caller completes them."""
        with self._lock:
            self._abandoned = True
            queued = [request for bucket in self._backlog.buckets.values() for request in bucket]
            for request in queued:
                self._end_queued_locked(request)
            for device in self._devices.each:
                device.ready.notify_all()
            self._back.notify_all()
            return queued

    def wait_done(self, until: float) -> bool:
        """Waits until nothing is queued and no worker busy, at most to `until`; whether that came about."""
        with self._lock:
            while self._backlog.rows or self._busy_workers:
                if self._clock.now() >= until:
                    return False
                self._drainers += 1
                try:
                    self._clock.wait(self._all_done, until)
                finally:
                    self._drainers -= 1
            return True

    @property
    def accepted(self) -> int:
        """How many were accepted since the start; the parts of a request count as one."""
        with self._lock:
            return self._accepted

    def sizes(self) -> QueueSizes:
        """The sizes at this moment."""
        with self._lock:
            return QueueSizes(
                len(self._backlog),
                self._backlog.rows,
                self._running,
                self._held_bytes,
                tuple(self._backlog.rows_of_classes(self.ranks)),
            )

    def learned(self) -> tuple[Mapping[Hashable, BucketStatistics], ReturnersStatistics]:
        """What is known of every bucket, and of callers that come back."""
        with self._lock:
            return self._backlog.statistics(), self.company.returners.statistics()
