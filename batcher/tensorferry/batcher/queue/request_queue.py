"""The queue: the one lock, the parts that it guards, and what threads ask of them.

Decisions are made under the lock and returned as records; the caller completes requests.
Every change of a request's state happens here, under the one lock, so that of two racing
events (a cancel and an answer, say) exactly one finds the request still alive.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial

from tensorferry.batcher.clock import Clock
from tensorferry.batcher.errors import QueueFull
from tensorferry.batcher.learning.return_model import Returners
from tensorferry.batcher.policy.close_rule import Wait
from tensorferry.batcher.queue.admission import Admission
from tensorferry.batcher.queue.backlog import Backlog
from tensorferry.batcher.queue.batch_selection import BatchSelector
from tensorferry.batcher.queue.client_quotas import ClientQuotas
from tensorferry.batcher.queue.device_failures import DeviceFailures
from tensorferry.batcher.queue.devices import Device, Devices
from tensorferry.batcher.queue.dispatch import Dispatch
from tensorferry.batcher.queue.endings import Ends
from tensorferry.batcher.queue.expiry import Expiry
from tensorferry.batcher.queue.fair_backlog import FairBacklog
from tensorferry.batcher.queue.inline_execution import InlineExecution
from tensorferry.batcher.queue.intake import BoundedIntake, Intake
from tensorferry.batcher.queue.learning_sync import LearningSync
from tensorferry.batcher.queue.reply_wait import ReplyWait
from tensorferry.batcher.queue.wakeup import WorkerWakeup
from tensorferry.batcher.request import DONE, QUEUED, RUNNING, BatchAssignment, Request
from tensorferry.batcher.settings import ClientPolicy, Limits, QueuePolicy
from tensorferry.batcher.statistics.counters import QueueSizes

_INF = math.inf


class RequestQueue:
    """The requests that were accepted and are not done. Every method is thread-safe.

    `max_rows` bounds the rows queued, `max_bytes` the bytes of all accepted requests that
    are not done, running ones included: they are held in memory just the same. Each of
    `devices` has one worker that takes work for it, two if `pipelined`. `weights` are those of
    the priority classes, the highest first; if `strict`, each rides before all lower ones instead. `policies`
    has one for each class, or none at all. `steady` says that a batch's time depends on its shape
    alone: only then others than workers may run it. `clients` says what each client may have; None: whatever
    there is.

    `outages` is told of devices that fail, `lessons` of what batches teach.
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
        self._clock = clock
        self._pipelined = pipelined
        # Guards every part below, but for what says otherwise, and the state of every request in here. Nothing is
        # completed, run, joined, learned, logged or waited for (but by the conditions) while it is held.
        lock = self._lock = threading.Lock()
        # How many ranks a class has: those who have timed out and are delayed are one below the others.
        self.ranks = 2 if any(policy.delays and policy.expires for policy in policies) else 1
        classes = self.ranks * len(weights)
        # One device runs one batch at a time, and none waits for a window's end.
        simple = devices == 1 and not pipelined and not limits.max_queue_delay
        each = self._devices = Devices(lock, devices)
        if clients is not None and clients.fair:
            backlog: Backlog = FairBacklog(limits, classes, clients.weights, pipelined=pipelined)
        else:
            backlog = Backlog(limits, classes, pipelined=pipelined)
        self._backlog = backlog
        quotas = self._quotas = ClientQuotas(clients) if clients is not None and clients.bounds else None
        admission = self._admission = Admission(backlog, max_rows, max_bytes, each, policies, self.ranks)
        due = threading.Condition(lock)
        ends = self._ends = Ends(backlog, admission, each, quotas, due, threading.Condition(lock))
        expiry = self._expiry = Expiry(due, backlog, each, policies, ends.end_queued)
        departure = BatchSelector(backlog, each, weights, self.ranks, limits.max_batch_size, strict=strict)
        self._standing = departure.standing
        company = self.company = ReplyWait(returners or Returners(), hears=simple)
        waking = self._waking = WorkerWakeup(clock, limits, backlog, each, company, alert=bool(policies))
        lending = self._lending = InlineExecution(each.each[0], possible=simple and steady)
        intake: Callable[..., Intake] = Intake if quotas is None else partial(BoundedIntake, quotas)
        self._intake = intake(
            clock, admission, backlog, each, departure, expiry, company, waking, ends.end_queued
        )
        dispatch = self._dispatch = Dispatch(
            clock, limits, backlog, each, departure, expiry, company, waking, ends, pipelined=pipelined
        )
        self.lessons = LearningSync(lock, clock, backlog, departure.row_limits, company.returners)
        self.outages = DeviceFailures(
            lock, clock, backlog, each, admission, expiry, waking, lending, dispatch, ends
        )

    def check_size(self, rows: int, nbytes: int) -> None:
        """RequestTooLarge when so many rows or bytes could never be accepted."""
        self._admission.check_size(rows, nbytes)
        if self._quotas is not None:
            self._quotas.check_size(rows, nbytes)

    def anchor(self, rows: int, seconds: float, key: Hashable = None) -> None:
        """As `LearningSync.anchor`."""
        self.lessons.anchor(rows, seconds, key)

    def put(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Accepts the requests, all or none: one, or the parts of one.

        RequestTooLarge when they can never fit, QueueFull when they do not fit now, or would be too late behind others,
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

    def pass_by(self, request: Request) -> None:
        """Counts a request that is answered without being queued.

        BatcherClosed, InstanceFailed and DeadlineExceeded as `put` raises them.
        """
        with self._lock:
            self._intake.pass_by(request)
            request.state = DONE

    def foreseen(self, deadline: float) -> QueueFull | None:
        """Why a request with this deadline would be turned away; None where that is not certain."""
        # Nearly always; and who sees it a moment too late is looked at like everybody else.
        if self._standing.notice is None:
            return None
        with self._lock:
            return self._intake.foreseen(deadline)

    def drain_time(self) -> float:
        """How long the queue as it is takes to drain, in seconds; at least a millisecond."""
        with self._lock:
            return self._admission.drain_time()

    def take(self, device: int = 0) -> BatchAssignment | None:
        """Waits for work for a device and hands it out; None when the queue is closed and empty.

        RECOVER tells to bring the device back, and to say to `outages` whether it
        is. Who has run and completed the work says so with `ran`, and, when pipelined, with `released`
        as soon as the device has.
        """
        with self._lock:
            mine = self._devices.each[device]
            while True:
                if mine.outage is not None:
                    if self._ends.closing and not self._backlog.rows:
                        return None
                    if (order := self.outages.stand_by_locked(mine, mine.outage)) is not None:
                        return order
                    continue
                step = self._poll_locked(mine)
                if not isinstance(step, Wait):
                    return step
                until = step.until
                if self._expiry.needed and mine.idle and not mine.unanswered:
                    # Nobody else looks after them as long as it waits.
                    until = min(until, self._expiry.next_timeout())
                self._waking.wait(mine, until)

    def take_short(self, most_seconds: float) -> BatchAssignment | float:
        """Work for the one device if its worker waits and the batch should take at most so long.

        Else until when to wait for returners before it is asked again, as a time on the clock;
        inf when there is nothing to do, or a worker was woken to do it.
        """
        with self._lock:
            self.company.heard()
            if not self._backlog.rows:
                return _INF
            now, mine = self._clock.now(), self._devices.each[0]
            if self._lending.possible_now(now):
                step = self._poll_locked(mine) if self._backlog.slowest_batch() <= most_seconds else None
                if isinstance(step, BatchAssignment):
                    mine.borrowed = bool(step.batch)
                    return step
                if isinstance(step, Wait) and step.until < _INF:
                    return step.until
            self._waking.wake(now)
            return _INF

    def poll(self, device: int = 0) -> BatchAssignment | Wait | None:
        """What `take` would do now, without waiting: for those who live in virtual time."""
        with self._lock:
            return self._poll_locked(self._devices.each[device])

    def _poll_locked(self, device: Device) -> BatchAssignment | Wait | None:
        try:
            return self._dispatch.poll(device)
        except BaseException:
            self._dispatch.fell()
            raise

    def still_running(self, requests: Iterable[Request]) -> list[Request]:
        """Those of a batch's requests that nobody has cancelled since it left."""
        with self._lock:
            return [request for request in requests if request.state is RUNNING]

    def kept_too_long(self, device: int, since: float) -> bool:
        """Whether a thread that attends, instead of a worker, has been busy with a batch for long since that time."""
        with self._lock:
            return self._devices.each[device].borrowed and self._lending.is_long(self._clock.now() - since)

    def released(self, device: int) -> None:
        """A pipelined device has run its batch, which is yet to be completed."""
        with self._lock:
            mine = self._devices.each[device]
            self._devices.released(mine, self._clock.now())
            mine.ready.notify()

    def finish(self, requests: Sequence[Request]) -> list[Request]:
        """Ends running requests; returns those that were still alive, which the caller completes."""
        # Here rather than for each that is ended: mostly all are.
        nbytes = sum([request.nbytes for request in requests])
        with self._lock:
            alive = self._ends.finish(requests, nbytes)
            if alive:
                by_worker = not self._devices.each[0].borrowed
                # Where it is asked for.
                alone = self._backlog.profile(alive[0].key).mean(1) if by_worker else 0.0
                self.company.ran(self._clock.now(), len(alive), alone, by_worker=by_worker)
            return alive

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
        it failed, and then `before` is all the time that it took, or there was none. Returns whether
        anything is queued.
        """
        lessons = self.lessons
        try:
            rows = 0
            if seconds is not None:
                rows = (
                    batch[0].rows_counted
                    if len(batch) == 1
                    else sum([request.rows_counted for request in batch])
                )
            with self._lock:
                now = self._clock.now()
                if batch:
                    mine = self._devices.each[device]
                    # A thread that attends is kept by all that is done for a batch, not by the run alone.
                    if mine.borrowed or seconds is None:
                        self._lending.ran(before + (seconds or 0.0) + after, now)
                    else:
                        self._lending.ran(seconds, now)
                    self._answered_locked(mine, now)
                due = lessons.due_locked(batch, rows, seconds, before, after, device, now)
                if due is None:
                    return self._ends.rest()
            with lessons.learning:
                learned = lessons.learn(due)
                with self._lock:
                    lessons.believe_locked(due, learned)
                    return self._ends.rest()
        except BaseException:
            with self._lock:
                self._ends.rest()
            raise

    def _answered_locked(self, device: Device, now: float) -> None:
        """A batch that was taken for a device is completed."""
        if device.borrowed:
            device.borrowed = False
            if self._ends.closing:
                # Its workers wait for what they have not run themselves, and may end now.
                device.ready.notify_all()
        device.unanswered -= 1
        if device.outage is not None:
            self._devices.back_or_done.notify_all()
        if self._pipelined:
            device.ready.notify()
        else:
            self._devices.released(device, now)

    def take_expired(self) -> Sequence[Request] | None:
        """Waits until queued requests cannot make their deadlines while no worker is free to see it.

        Hands these out, and is told by `expired_completed` when they are; None when the queue is
        closed and empty.
        """
        with self._lock:
            expiry, ends = self._expiry, self._ends
            while not (ends.closing and not self._backlog.rows):
                now, expiry.at = self._clock.now(), _INF
                if not self._devices.attended():
                    if dead := expiry.take(now, now):
                        # Not before: were it to end the queue's work, drain would not wait for it.
                        ends.busy += 1
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
            self._ends.rest()

    def stand_off(self, seconds: float) -> None:
        """Waits for so long, or until the queue closes or somebody has something for who takes the expired."""
        with self._lock:
            self._clock.wait(self._expiry.due, self._clock.now() + seconds)

    def cancel(self, request: Request) -> bool:
        """Ends a request that is queued or running; True when the caller is to complete it."""
        with self._lock:
            if request.state is QUEUED:
                self._ends.end_queued(request)
            elif request.state is RUNNING:
                self._ends.running -= 1
                self._ends.end(request)
            else:
                return False
            return True

    def close(self) -> None:
        """Accepts nothing from now on; what is queued still runs. Idempotent."""
        with self._lock:
            self._ends.close()

    def abandon(self) -> list[Request]:
        """Ends every request, queued or not yet finished queueing; the caller completes them."""
        with self._lock:
            return self._ends.abandon()

    def wait_done(self, until: float) -> bool:
        """Waits until nothing is queued and no worker busy, at most to `until`; whether that came about."""
        with self._lock:
            return self._ends.wait_done(self._clock, until)

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
                self._ends.running,
                self._admission.held_bytes,
                tuple(self._backlog.rows_of_classes(self.ranks)),
            )
