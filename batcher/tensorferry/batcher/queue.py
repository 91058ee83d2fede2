"""The queue: admission, who is woken, expiry, cancellation, and what is in flight.

Decisions are made under the lock and returned as records; the caller completes requests.
Every change of a request's state happens here, under the one lock, so that of two racing
events (a cancel and an answer, say) exactly one finds the request still alive.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial

from tensorferry.batcher.admission import Admission
from tensorferry.batcher.backlog import Backlog
from tensorferry.batcher.clients import ClientPolicy, Quotas
from tensorferry.batcher.clock import Clock
from tensorferry.batcher.company import Company
from tensorferry.batcher.departure import Departure
from tensorferry.batcher.device import Device, Devices
from tensorferry.batcher.expiry import Expiry
from tensorferry.batcher.fair_backlog import FairBacklog
from tensorferry.batcher.intake import BoundedIntake, Intake
from tensorferry.batcher.lending import Lending
from tensorferry.batcher.outages import Outages
from tensorferry.batcher.policy import Close, CloseReason, Limits, Wait, decide
from tensorferry.batcher.profile import BucketStatistics, Profile
from tensorferry.batcher.request import DONE, QUEUED, RUNNING, Request
from tensorferry.batcher.returners import Returners, ReturnersStatistics
from tensorferry.batcher.slower import LeftBucket, Paced, left_to
from tensorferry.batcher.statistics import QueueSizes
from tensorferry.batcher.timeouts import QueuePolicy
from tensorferry.batcher.waking import Waking
from tensorferry.batcher.work import Work

_INF = math.inf

# For what is done for each batch: to look a member up costs more.
_IDLE = CloseReason.IDLE

_new = tuple.__new__

# After so many seconds a slower device to which nothing was left runs one request all the same: perhaps it
# is no longer slow, and nobody else would see that.
_RETRY_SECONDS = 10.0


class RequestQueue(Outages):
    """The requests that were accepted and are not done. Every method is thread-safe.

    `max_rows` bounds the rows queued, `max_bytes` the bytes of all accepted requests that
    are not done, running ones included: they are held in memory just the same. Each of
    `devices` has one worker that takes work for it, two if `pipelined`. `weights` are those of
    the priority classes, the highest first; if `strict`, each rides before all lower ones instead. `policies`
    has one for each class, or none at all. `steady` says that a batch's time depends on its shape
    alone: only then others than workers may run it. `clients` says what each client may have; None: whatever
    there is.
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
        clients: ClientPolicy | None = None,
    ) -> None:
        self._limits = limits
        self._clock = clock
        self._pipelined = pipelined
        # Guards every field below and the state of every request in here. Nothing is completed,
        # run, joined, learned, logged or waited for (but by the conditions) while it is held.
        self._lock = threading.Lock()
        # Held by who works out what batches teach. Taken before the other, never while that is held.
        self._lessons = threading.Lock()
        # How many ranks a class has: those who have timed out and are delayed are one below the others.
        self.ranks = 2 if any(policy.delays and policy.expires for policy in policies) else 1
        self._devices = Devices(self._lock, devices)
        classes = self.ranks * len(weights)
        if clients is not None and clients.fair:
            self._backlog: Backlog = FairBacklog(limits, classes, clients.weights, pipelined=pipelined)
        else:
            self._backlog = Backlog(limits, classes, pipelined=pipelined)
        self._quotas = Quotas(clients) if clients is not None and clients.bounds else None
        self._admission = Admission(self._backlog, max_rows, max_bytes, self._devices, policies, self.ranks)
        self._expiry = Expiry(self._lock, self._backlog, self._devices, policies, self._end_queued_locked)
        self._departure = Departure(
            self._backlog, self._devices, weights, self.ranks, limits.max_batch_size, strict=strict
        )
        # One device runs one batch at a time, and none waits for a window's end.
        simple = devices == 1 and not pipelined and not limits.max_queue_delay
        self.company = Company(returners or Returners(), hears=simple)
        self._waking = Waking(clock, limits, self._backlog, self._devices, self.company, alert=bool(policies))
        self._lending = Lending(self._backlog, self._devices.each[0], possible=simple and steady)
        intake: Callable[..., Intake] = Intake
        if self._quotas is not None:
            intake = partial(BoundedIntake, self._quotas)
        self._intake = intake(
            clock,
            self._admission,
            self._backlog,
            self._devices,
            self._departure,
            self._expiry,
            self.company,
            self._waking,
            self._end_queued_locked,
        )
        # Nothing is queued and no worker is busy. Waited for by drain; notified by whoever ends it.
        self._all_done = threading.Condition(self._lock)
        # Threads that wait for it.
        self._drainers = 0
        self._running = 0
        # Threads that took work, or the expired, and have not yet run and completed all of it.
        self._busy_workers = 0
        self._closing = False
        self._no_outages()

    def check_size(self, rows: int, nbytes: int) -> None:
        """RequestTooLarge when so many rows or bytes could never be accepted."""
        self._admission.check_size(rows, nbytes)
        if self._quotas is not None:
            self._quotas.check_size(rows, nbytes)

    def anchor(self, rows: int, seconds: float, key: Hashable = None) -> None:
        """A warm-up run of so many rows: what the latency model of the key's bucket starts from.

        Without a key that of every bucket, where they all cost the same.
        """
        with self._lessons, self._lock:
            self._backlog.anchor(rows, seconds, key)

    def put(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Accepts the requests, all or none: one, or the parts of one.

        RequestTooLarge when they can never fit, QueueFull when they do not fit now,
        DeadlineExceeded when one could not make its deadline even if it ran alone as soon as
        a device is free, BatcherClosed when the queue closes, InstanceFailed when no device works;
        then none was accepted. Returns
        requests of lower classes that were dropped to make room: the caller completes them.
        """
        company = self.company
        with self._lock:
            displaced, wake = self._intake.put(requests)
            company.quiet = company.unheard = False
            if wake:
                self._waking.wake(self._clock.now())
            return displaced

    def put_quietly(self, requests: Sequence[Request]) -> tuple[Sequence[Request], bool]:
        """As `put`, but wakes no worker: when true is returned, `take_short` must be called soon."""
        with self._lock:
            answer = self._intake.put(requests)
            self.company.quiet = True
            return answer

    def drain_time(self) -> float:
        """How long the queue as it is takes to drain, in seconds; at least a millisecond."""
        with self._lock:
            return self._admission.drain_time()

    def take(self, device: int = 0) -> Work | None:
        """Waits for work for a device and hands it out; None when the queue is closed and empty.

        RECOVER tells to bring the device back, and to say by `recovered` or `not_recovered` whether it
        is. Who has run and completed the work says so with `ran`, and, when pipelined, with `released`
        as soon as the device has.
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
                try:
                    step = self._poll_locked(mine)
                except BaseException:
                    self._orphan_locked()
                    raise
                if not isinstance(step, Wait):
                    return step
                until = step.until
                if self._expiry.needed and mine.idle and not mine.unanswered:
                    # Nobody else looks after them as long as it waits.
                    until = min(until, self._expiry.next_timeout())
                self._waking.wait(mine, until)

    def take_short(self, most_seconds: float) -> Work | float:
        """Work for the one device if its worker waits and the batch should take at most so long.

        Else until when to wait for returners before it is asked again, as a time on the clock;
        inf when there is nothing to do, or a worker was woken to do it.
        """
        with self._lock:
            self.company.heard()
            if not self._backlog.rows:
                return _INF
            now, mine = self._clock.now(), self._devices.each[0]
            if self._lending.allows(most_seconds, now):
                try:
                    step = self._poll_locked(mine)
                except BaseException:
                    self._orphan_locked()
                    raise
                if isinstance(step, Work):
                    mine.borrowed = bool(step.batch)
                    return step
                if isinstance(step, Wait) and step.until < _INF:
                    return step.until
            self._waking.wake(now)
            return _INF

    def poll(self, device: int = 0) -> Work | Wait | None:
        """What `take` would do now, without waiting: for those who live in virtual time."""
        with self._lock:
            return self._poll_locked(self._devices.each[device])

    def _poll_locked(self, device: Device) -> Work | Wait | None:
        now, backlog = self._clock.now(), self._backlog
        start = now
        # What left for it is unanswered at least as long as it is in flight.
        if device.unanswered:
            turn = self._waking.turn(device, now)
            if turn > now:
                if backlog.rows and not device.idle:
                    # It may have been woken instead of one that can start at once.
                    self._devices.wake_idle()
                return Wait(turn if backlog.rows else _INF)
            start = device.starts(now)
        dead = self._dying = self._expiry.take(start, now) if self._expiry.needed else ()
        left: Mapping[Hashable, LeftBucket] = {}
        if self._devices.unequal and backlog.rows:
            device.passes = False
            if self._devices.slower(device):
                left = left_to(backlog.buckets, device.pace.value, start)
                if not left:
                    return self._pass_on_locked(device, now, dead)
        credits = self._departure.credits(now)
        decision = decide(left or backlog.buckets, now, self._limits, self._closing, credits)
        if isinstance(decision, Close):
            if decision.reason is _IDLE and not self._closing and len(backlog.buckets) == 1:
                bucket = backlog.buckets[decision.key]
                most = self._limits.max_batch_size
                if self._departure.row_limits.needed:
                    most = self._departure.row_limits.rows(self._devices.each.index(device), decision.key)
                until = self.company.wait_until(bucket, now, most - bucket.rows)
                if until > now and not dead:
                    return self._waking.wait_for_company(device, until)
            return self._close_locked(device, decision, now, dead, left.get(decision.key))
        if dead:
            return self._hand_out_locked(Work((), None, tuple(dead)), now)
        if self._closing and not backlog.rows:
            return None
        return decision

    def _pass_on_locked(self, device: Device, now: float, dead: Sequence[Request]) -> Work | Wait:
        """A slower device leaves what is queued to faster ones, but for one request now and then."""
        again = device.ran_at + _RETRY_SECONDS
        if now >= again and not self._closing:
            device.ran_at = now
            key = next(iter(self._backlog.buckets))
            return self._close_locked(device, Close(key, _IDLE, 1), now, dead)
        if dead:
            return self._hand_out_locked(Work((), None, tuple(dead)), now)
        # A rounding error must not make this a busy loop.
        until = max(self._expiry.next(now), now + 1e-4)
        return self._waking.pass_on(device, min(until, again) if again > now else until, now)

    def _close_locked(
        self,
        device: Device,
        close: Close,
        now: float,
        dead: Sequence[Request],
        left: LeftBucket | None = None,
    ) -> Work:
        profile = self._backlog.buckets[close.key].profile
        times = profile if device.pace.value == 1.0 else Paced(profile, device.pace.value)
        batch, shed, riding = self._departure.take(close, device, now, left)
        before = device.unanswered, self._running, self._busy_workers
        try:
            for request in batch:
                request.state = RUNNING
                request.started = now
            self._running += len(batch)
            rows = sum(riding)
            keeps = whole = times.whole(rows)
            if self._pipelined:
                device.preparation, keeps = profile.preparation(rows), times.mean(rows)
                if len(self._devices.each) > 1:
                    # A single device would lose more by the smaller batches than is late: nobody else takes the rest.
                    device.doubt = times.upper(rows) - whole
            self._devices.left(device, now, keeps)
            # As `Work(...)`, in half the time.
            work = _new(Work, (tuple(batch), close.reason, tuple(dead), tuple(shed), whole))
            handed = self._hand_out_locked(work, now)
        except BaseException:
            unanswered, self._running, self._busy_workers = before
            if device.unanswered > unanswered:
                device.unsay()
            self._back_in_line_locked([*batch, *shed])
            raise
        for request in shed:
            self._done_locked(request)
        return handed

    def _hand_out_locked(self, work: Work, now: float) -> Work:
        self._busy_workers += 1
        # Another must now wait for what this one leaves behind, be it only for a window's end.
        if self._backlog.rows:
            self._waking.wake(now)
            if self._expiry.needed:
                self._expiry.watch(self._expiry.next(now))
        self._dying = ()
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
        try:
            rows = sum([request.cost for request in batch]) if seconds is not None else 0
            with self._lock:
                taught: Profile | None = None
                now = self._clock.now()
                if batch:
                    mine = self._devices.each[device]
                    if mine.borrowed:
                        mine.borrowed = False
                        if self._closing:
                            # Its workers wait for what they have not run themselves, and may end now.
                            mine.ready.notify_all()
                    mine.unanswered -= 1
                    if mine.outage is not None:
                        self._back.notify_all()
                    if self._pipelined:
                        mine.ready.notify()
                    else:
                        self._devices.released(mine, now)
                if seconds is not None:
                    self._lending.ran(seconds, now)
                    if self._departure.row_limits.needed:
                        self._departure.row_limits.fitted(device, batch[0].key, rows)
                    profile = self._backlog.profile(batch[0].key)
                    if profile.teaches(now, rows, seconds + before + after):
                        taught = profile
                        if len(self._devices.each) > 1:
                            seconds = self._devices.paced(mine, seconds, profile.device.mean(rows), now)
                answers = self.company.returners.lesson
                if taught is None and answers is None:
                    return self._rest_locked()
            with self._lessons:
                lesson = None
                if taught is not None and seconds is not None:
                    lesson = taught.learn(rows, seconds, before, after)
                back = answers.back() if answers is not None else ()
                with self._lock:
                    if taught is not None and lesson is not None:
                        taught.believe(lesson, now)
                    if answers is not None:
                        self.company.returners.believe(answers, back)
                    return self._rest_locked()
        except BaseException:
            with self._lock:
                self._rest_locked()
            raise

    def _rest_locked(self) -> bool:
        """A worker is busy no more; whether anything is queued."""
        self._busy_workers -= 1
        self._tell_if_done_locked()
        return self._backlog.rows > 0

    def take_expired(self) -> Sequence[Request] | None:
        """Waits until queued requests cannot make their deadlines while no worker is free to see it.

        Hands these out, and is told by `expired_completed` when they are; None when the queue is
        closed and empty.
        """
        with self._lock:
            expiry = self._expiry
            while not (self._closing and not self._backlog.rows):
                now, expiry.at = self._clock.now(), _INF
                if not self._devices.attended():
                    if dead := expiry.take(now, now):
                        # Not before: were it to end the queue's work, drain would not wait for it.
                        self._busy_workers += 1
                        return dead
                    # A rounding error must not make this a busy loop.
                    expiry.at = max(expiry.next(now), now + 1e-4)
                if expiry.at < _INF:
                    self._clock.wait(expiry.due, expiry.at)
                else:
                    expiry.due.wait()
            return None

    def expired_completed(self) -> None:
        """Those that `take_expired` handed out are completed."""
        with self._lock:
            self._rest_locked()

    def _end_queued_locked(self, request: Request) -> None:
        self._backlog.remove(request)
        self._done_locked(request)

    def _done_locked(self, request: Request) -> None:
        request.state = DONE
        self._admission.held_bytes -= request.nbytes
        if self._quotas is not None:
            self._quotas.done(request)
        self._tell_if_done_locked()

    def _tell_if_done_locked(self) -> None:
        if not self._backlog.rows:
            if self._drainers and not self._busy_workers:
                self._all_done.notify_all()
            if self._closing:
                self._expiry.due.notify()
                self._back.notify_all()
                for device in self._devices.each:
                    if device.passes:
                        device.ready.notify_all()

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
            self._admission.held_bytes -= nbytes
            self._running -= len(alive)
            if self._quotas is not None:
                for request in alive:
                    self._quotas.done(request)
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
            self._admission.close()
            for device in self._devices.each:
                device.ready.notify_all()
            self._back.notify_all()
            self._expiry.due.notify()

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
            return self._intake.accepted

    def sizes(self) -> QueueSizes:
        """The sizes at this moment."""
        with self._lock:
            return QueueSizes(
                len(self._backlog),
                self._backlog.rows,
                self._running,
                self._admission.held_bytes,
                tuple(self._backlog.rows_of_classes(self.ranks)),
            )

    def learned(self) -> tuple[Mapping[Hashable, BucketStatistics], ReturnersStatistics]:
        """What is known of every bucket, and of callers that come back."""
        with self._lessons, self._lock:
            return self._backlog.statistics(), self.company.returners.statistics()
