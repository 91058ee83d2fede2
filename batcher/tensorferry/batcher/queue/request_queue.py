"""The queue of a batcher, and its one lock.

Decisions are made under the lock and returned as records; the caller runs batches and completes requests.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Sequence

from tensorferry.batcher.clock import Clock
from tensorferry.batcher.learning.return_model import ReturnModel
from tensorferry.batcher.policy.close_rule import Close, Wait, decide
from tensorferry.batcher.queue.admission import Admission
from tensorferry.batcher.queue.backlog import Backlog
from tensorferry.batcher.queue.batch_selection import BatchSelector
from tensorferry.batcher.queue.device_failures import DeviceFailures
from tensorferry.batcher.queue.devices import Device, Devices
from tensorferry.batcher.queue.expiry import Expiry
from tensorferry.batcher.queue.fair_backlog import FairBacklog
from tensorferry.batcher.queue.model_updater import ModelUpdater
from tensorferry.batcher.queue.request_states import RequestStates
from tensorferry.batcher.queue.wakeup import LONG_SECONDS, InlineExecution, WorkerWakeup
from tensorferry.batcher.request import DONE, QUEUED, RUNNING, BatchAssignment, CloseReason, Recover, Request
from tensorferry.batcher.settings import BatcherSettings
from tensorferry.batcher.statistics.counters import QueueSizes

_INF = math.inf


class RequestQueue:
    """All accepted requests that are not done. Every method without `_locked` is thread-safe; none runs a batch.

    A request goes through `put`, `take` and `finish`. Workers take batches for their device with `take`, one worker
    for each device or two if pipelined; a submitting thread takes short ones with `take_inline`. When a batch is run
    and its requests are completed, `batch_done` must be called. Requests that end in another way are handed out: the
    caller completes those that a method returns, and then, if there are any, calls `handed_out_completed`. `failures`
    handles devices that fail, `learning` has the measured durations, `admission` says what has room. All share the lock.
    `overload` says which requests are rejected early.
    """

    def __init__(self, settings: BatcherSettings, clock: Clock, returns: ReturnModel | None = None) -> None:
        self._settings = settings
        self._clock = clock
        # Guards every field below and the objects they refer to, unless these say otherwise, and the state of every
        # request. While it is held, no request is completed, no batch is run or joined, nothing is learned or logged,
        # and no thread waits for anything but the conditions built on it.
        lock = self._lock = threading.Lock()
        devices = self._devices = Devices(lock, settings.devices)
        fair = settings.clients is not None and settings.clients.fair
        backlog = self._backlog = FairBacklog(settings) if fair else Backlog(settings)
        self._selector = BatchSelector(settings, backlog, devices)
        self._arrivals, self.overload = self._selector.arrivals, self._selector.overload
        self.admission = Admission(settings, lock, clock, backlog, devices, self._selector)
        self._expiry = Expiry(lock, backlog, devices, settings.policies)
        states = self._states = RequestStates(lock, backlog, devices, self.admission, self._expiry)
        self._returns = returns = returns or ReturnModel()
        inline = self._inline = InlineExecution(settings)
        wakeup = self._wakeup = WorkerWakeup(clock, settings, backlog, devices, returns, self._expiry)
        self.learning = ModelUpdater(lock, clock, backlog, self._selector.row_limits, returns)
        self.failures = DeviceFailures(lock, clock, devices, self.admission, states, wakeup, inline)
        # Requests accepted since the start; the parts of a split request count as one. May be read without the lock.
        self.accepted = 0
        # No batch waits for more requests.
        self._flushing = False

    # Arrival.

    def put(
        self, requests: Sequence[Request], *, notify: bool = True, skip_admission: bool = False
    ) -> tuple[Sequence[Request], bool]:
        """Accept one request, or all parts of one, or raise.

        Returns the queued requests that were dropped to make room, which it hands out; and, without `notify`,
        whether the caller must call `take_inline` or `wake` soon: no worker was woken, though one is needed. With `skip_admission`
        they are queued whether or not there is room.

        Raises RequestTooLarge if the request can never fit; QueueFull if it does not fit now, or would be too late
        behind others; DeadlineExceeded if it could not meet its deadline even if it ran alone as soon as a device is
        free; BatcherClosed if the queue is closed; InstanceFailed if no device works.
        """
        first = requests[0]
        rows, nbytes, deadline = first.rows_counted, first.nbytes, first.deadline
        if len(requests) > 1:
            rows = sum([request.rows_counted for request in requests])
            nbytes = sum([request.nbytes for request in requests])
        with self._lock:
            now, backlog = self._clock.now(), self._backlog
            displaced = self.admission.admit(requests, rows, nbytes, now, skip_admission=skip_admission)
            self.accepted += 1
            if displaced:
                self._states.hand_out(self._states.end_alive(displaced))
            self._returns.arrived(now)
            arrivals = self._arrivals
            counted = deadline < _INF or now < arrivals.counted_until
            must_wake = False
            for request in requests:
                request.arrival = now
                request.state = QUEUED
                if counted:
                    arrivals.arrived(request.rank, now, request.rows_counted, deadline - now)
                bucket = backlog.add(request)
                if not must_wake:
                    # For the first request of a batch, and for the last.
                    must_wake = (
                        bucket.rows == request.rows_counted or bucket.rows >= bucket.cost_model.full_rows
                    )
            wakeup = self._wakeup
            if self._expiry.has_timeouts:
                self._expiry.queued(requests)
            elif deadline < self._expiry.wait_until and (wakeup.pending or self._states.busy):
                # Otherwise a worker waits for this request, and expires it if need be.
                self._expiry.notify_by(deadline)
            if wakeup.pending:
                return displaced, False
            if not must_wake and wakeup.waits_for_more:
                must_wake = wakeup.must_wake_for(bucket, deadline)
            if must_wake and notify:
                wakeup.wake(now)
            return displaced, must_wake and not notify

    def check_answered(self, request: Request) -> None:
        """Raise as `put_answered` does."""
        with self._lock:
            self.admission.check_answered(request, self._clock.now())

    def put_answered(self, request: Request) -> None:
        """Accept a request that is answered without being run, and hand it out. Raises as `put` does."""
        with self._lock:
            self.admission.check_answered(request, self._clock.now())
            self.accepted += 1
            request.state = DONE
            self._states.hand_out((request,))

    # Dispatch.

    def take(self, device: int = 0) -> BatchAssignment | Recover | None:
        """Wait for work for a device and return it; None when the queue is closed and empty.

        After a batch the caller calls `batch_done`, and before, if pipelined, `run_done` as soon as the device has run
        it. With `Recover` it must recover the device and report to `failures`.
        """
        with self._lock:
            mine = self._devices.each[device]
            while True:
                if mine.outage is not None:
                    if self._states.closing and not self._backlog.rows:
                        return None
                    if (action := self.failures.wait_for_recovery_locked(mine, mine.outage)) is not None:
                        return action
                    continue
                step = self._poll_locked(mine)
                if not isinstance(step, Wait):
                    return step
                until = step.until
                if self._expiry.has_timeouts and not mine.batches_outstanding:
                    # While this worker waits, it is the one to expire requests.
                    until = min(until, self._expiry.next_timeout())
                self._wakeup.wait(mine, until)

    def take_inline(self, max_seconds: float) -> BatchAssignment | float:
        """Return a batch for the submitting thread, if the worker is idle and the batch should take at most that long.

        Otherwise return when to call this again, on the queue's clock: a batch waits for more requests until then. It
        is inf if there is nothing to do, or a worker was woken to do it.
        """
        with self._lock:
            if not self._backlog.rows:
                return _INF
            now, device = self._clock.now(), self._devices.each[0]
            # The longest device time of a batch that could be dispatched.
            slowest = 0.0
            for bucket in self._backlog.queued_buckets.values():
                times, rows = bucket.cost_model, min(bucket.rows, self._settings.batch_rows)
                slowest = max(slowest, times.device_time(rows) if times.known else _INF)
            if (
                slowest <= max_seconds
                and now >= self._inline.allowed_from
                and device.waiting
                and device.outage is None
                and not device.in_flight
            ):
                # Before the batch is dispatched, so that no worker is woken for what is left.
                device.run_inline = True
                step: BatchAssignment | Wait | None = None
                try:
                    step = self._poll_locked(device)
                finally:
                    device.run_inline = isinstance(step, BatchAssignment) and bool(step.batch)
                if isinstance(step, BatchAssignment):
                    return step
                if step is not None and step.until < _INF:
                    return step.until
            self._wakeup.wake(now)
            return _INF

    def wake(self) -> None:
        """Wake a worker if anything is queued."""
        with self._lock:
            if self._backlog.rows:
                self._wakeup.wake(self._clock.now())

    def poll(self, device: int = 0) -> BatchAssignment | Wait | None:
        """Return what `take` would return now, or until when it would wait. For event loops and simulations."""
        with self._lock:
            return self._poll_locked(self._devices.each[device])

    def _poll_locked(self, device: Device) -> BatchAssignment | Wait | None:
        """Return a device's next work, or until when there is none; None when the queue is closed and empty."""
        now, backlog = self._clock.now(), self._backlog
        start = now
        # An idle device has no batches outstanding.
        if device.batches_outstanding:
            dispatch_at = self._wakeup.next_dispatch_at(device, now)
            if dispatch_at > now:
                if backlog.rows and not device.idle:
                    # This worker may have been woken instead of an idle device's.
                    self._devices.wake_idle()
                return Wait(dispatch_at if backlog.rows else _INF)
            start = device.start_at(now)
        if backlog.deadlines or self._expiry.has_timeouts:
            self._states.expire(start, now)
        credits: Sequence[float] = ()
        if len(backlog.queued_buckets) > 1 or len(backlog.class_rows) > 1:
            credits = self._selector.credits(now)
        decision = decide(backlog.queued_buckets, now, self._settings, self._flushing, credits)
        if isinstance(decision, Wait):
            if self._states.expired:
                self._wakeup.wake_for_backlog(now)
                return BatchAssignment((), None, tuple(self._states.hand_out_expired()), (), 0.0, 0, [])
            return None if self._states.closing and not backlog.rows else decision
        if decision.reason is CloseReason.IDLE and len(backlog.queued_buckets) == 1 and not self._flushing:
            # There is room for clients that were just answered.
            limits, bucket = self._selector.row_limits, backlog.queued_buckets[decision.key]
            max_rows = bucket.full_rows
            if limits.needed:
                max_rows = min(max_rows, limits.rows(self._devices.each.index(device), decision.key))
            cost_model, room = bucket.cost_model, max_rows - bucket.rows
            if cost_model.known and room > 0:
                until = self._returns.wait_until(
                    now, bucket.requests, cost_model.mean, room, cost_model.response_time
                )
                if until > now:
                    until = min(until, bucket.latest_start)
                if until > now and not self._states.expired:
                    return self._wakeup.wait_for_returns(device, bucket, until)
        return self._dispatch_locked(device, decision, start, now)

    def _dispatch_locked(self, device: Device, close: Close, start: float, now: float) -> BatchAssignment:
        """Take the batch of the bucket that closes, and all that goes with it; undo everything on an exception."""
        cost_model = self._backlog.queued_buckets[close.key].cost_model
        if self._wakeup.waits_for_more:
            self._wakeup.wait_is_over(device)
        batch, shed, rows_by_rank = self._selector.select(close, device, start, now)
        states, outstanding = self._states, device.batches_outstanding
        before = states.running, states.busy, tuple(states.expired)
        try:
            expired = states.dispatched(batch, now)
            rows = sum(rows_by_rank)
            predicted = cost_model.end_to_end(rows)
            if self._settings.pipelined:
                self._devices.dispatched(device, now, cost_model.mean(rows), cost_model.host_lead_time(rows))
            else:
                self._devices.dispatched(device, now, predicted)
            if self._backlog.rows:
                self._wakeup.wake_for_backlog(now)
            assignment = BatchAssignment(
                tuple(batch), close.reason, expired, tuple(shed), predicted, cost_model.full_rows, []
            )
        except BaseException:
            if device.batches_outstanding > outstanding:
                device.undo_dispatch()
            states.undo_dispatch([*batch, *shed], *before)
            raise
        for request in shed:
            states.end(request)
        return assignment

    # Completion.

    def still_running(self, requests: Iterable[Request]) -> list[Request]:
        """Return the requests of a batch that were not cancelled since it was dispatched."""
        with self._lock:
            return [request for request in requests if request.state is RUNNING]

    def run_done(self, device: int) -> None:
        """Note that a pipelined device has run its batch, which is yet to be completed."""
        with self._lock:
            mine = self._devices.each[device]
            self._devices.completed(mine, self._clock.now())
            mine.ready.notify()

    def finish(self, requests: Sequence[Request]) -> list[Request]:
        """End the requests of a batch, and return those that were alive, which the caller completes."""
        with self._lock:
            alive = self._states.finish(requests)
            if alive:
                # Not after the last answer: the first clients are back before that.
                self._returns.answered(self._clock.now(), len(alive))
            return alive

    def batch_done(
        self,
        batch: Sequence[Request],
        seconds: float | None,
        before: float = 0.0,
        after: float = 0.0,
        *,
        device: int = 0,
    ) -> bool:
        """Note that an assignment is completed, and learn from it; return whether anything is queued.

        The device ran the batch for `seconds`; the host prepared it for `before` and completed it for `after` seconds.
        If the batch failed, `seconds` is None and `before` is all the time it took. `batch` is empty if the assignment
        had none.
        """
        with self._lock:
            try:
                now, mine = self._clock.now(), self._devices.each[device]
                if batch:
                    busy_seconds = seconds
                    if busy_seconds is None or mine.run_inline:
                        # An inline run keeps its thread for all that is done for the batch.
                        busy_seconds = before + (seconds or 0.0) + after
                    if busy_seconds > LONG_SECONDS:
                        self._inline.suspend(now)
                    if mine.run_inline and self._states.closing:
                        # The workers wait for batches that others run, and may end now.
                        mine.ready.notify_all()
                    mine.run_inline = False
                    if not self._settings.pipelined:
                        self._devices.completed(mine, now)
                    mine.batch_done()
                    if mine.outage is not None:
                        self._devices.recovered_or_closed.notify_all()
                    if self._settings.pipelined:
                        mine.ready.notify()
                pending = self.learning.collect_locked(batch, seconds, before, after, device, now)
            except BaseException:
                self._states.completed()
                raise
            if pending is None:
                return self._states.completed()
        try:
            self.learning.update(pending)
        finally:
            with self._lock:
                queued = self._states.completed()
        return queued

    # Other ends of a request: it expires, is cancelled, is shed, or is queued again after a failure.

    def take_expired(self) -> Sequence[Request] | None:
        """Wait until requests expire that no worker is free to expire, and hand them out.

        Returns None when the queue is closed and empty.
        """
        with self._lock:
            while not (self._states.closing and not self._backlog.rows):
                now, until = self._clock.now(), _INF
                if not self._devices.has_free_waiter:
                    self._states.expire(now, now)
                    if self._states.expired:
                        return self._states.hand_out_expired()
                    # A rounding error must not make this a busy loop.
                    until = max(self._expiry.next(now), now + 1e-4)
                self._expiry.wait(self._clock, until)
            return None

    def hand_out(self, ended: Sequence[Request]) -> None:
        """Hand out requests that the caller had instead of the queue, so that a drain waits for their completions."""
        with self._lock:
            self._states.hand_out(ended)

    def handed_out_completed(self) -> None:
        """Note that the thread has completed the requests that it was handed out at once."""
        with self._lock:
            self._states.completed()

    def backoff(self, seconds: float) -> None:
        """Let the expiry thread wait, at most until the queue closes."""
        with self._lock:
            self._expiry.wait(self._clock, self._clock.now() + seconds)

    def cancel(self, requests: Iterable[Request]) -> Sequence[Request]:
        """End those of these requests that are queued or running, and hand them out."""
        with self._lock:
            return self._states.hand_out(self._states.end_alive(requests))

    def end_queued(self, request: Request) -> Sequence[Request]:
        """End a request that is queued and was not split, and hand it out; nothing if it is no longer queued."""
        with self._lock:
            if request.state is not QUEUED or request.split_parts:
                return ()
            self._states.end_queued(request)
            return self._states.hand_out((request,))

    def end_kept(self, taken: Iterable[BatchAssignment]) -> Sequence[Request]:
        """End the running requests of these assignments that did not go back into the queue, and hand them out."""
        with self._lock:
            ended = self._states.end_alive(request for work in taken for request in work.kept())
            return self._states.hand_out(ended)

    # The end of the queue.

    def flush(self) -> None:
        """Let no batch wait for more requests from now on. Idempotent."""
        with self._lock:
            self._flushing = True
            self._devices.notify_all()

    def close(self) -> None:
        """Accept nothing from now on; queued requests still run. Idempotent."""
        with self._lock:
            self._flushing = True
            self._states.close()
            self.admission.close()
            self._devices.notify_all()
            self._expiry.notify()

    def fail_all(self) -> Sequence[Request]:
        """End every queued request, hand them out, and queue none again. After `close`."""
        with self._lock:
            return self._states.hand_out(self._states.abandon())

    def wait_drained(self, until: float) -> bool:
        """Wait until nothing is queued and no thread is busy, at most until `until`; return whether that is so."""
        with self._lock:
            return self._states.wait_drained(self._clock, until)

    # State.

    @property
    def idle(self) -> bool:
        """Return whether nothing is queued or running. Takes no lock, so it may be late."""
        return not self._backlog.rows and not self._states.running

    def sizes(self) -> QueueSizes:
        """Return the current sizes."""
        with self._lock:
            return QueueSizes(
                sum([bucket.requests for bucket in self._backlog.queued_buckets.values()]),
                self._backlog.rows,
                self._states.running,
                self.admission.bytes_in_flight,
                tuple(self._backlog.rows_of_classes(self._settings.ranks_per_class)),
            )
