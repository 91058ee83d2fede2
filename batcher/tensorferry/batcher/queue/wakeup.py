"""Which thread runs the next batch, and how long a worker waits with it for clients that were just answered."""

from __future__ import annotations

import math

from tensorferry.batcher.clock import Clock
from tensorferry.batcher.learning.return_model import ReturnModel
from tensorferry.batcher.policy.close_rule import Wait
from tensorferry.batcher.queue.backlog import TIMER_SLACK, Backlog, Bucket
from tensorferry.batcher.queue.devices import Device, Devices
from tensorferry.batcher.queue.expiry import Expiry
from tensorferry.batcher.settings import BatcherSettings
from tensorferry.batcher.supervision import DoublingPause

# A timed wait is not cut short for less, in seconds.
_MIN_EARLIER = 100e-6

# The time of some models depends on their inputs' values. After a batch that took longer than this, in seconds,
# workers run every batch for a while. It is a hundred times the time of a short batch, because a busy machine
# suspends any thread for a few milliseconds.
LONG_SECONDS = 0.02
# That while, in seconds. The first is short, because the process may only have been suspended.
_FIRST_SUSPENSION_SECONDS, _MAX_SUSPENSION_SECONDS = 1.0, 60.0


class InlineExecution:
    """Decides when the submitting thread may run a short batch instead of the worker. Guarded by the queue's lock."""

    def __init__(self, settings: BatcherSettings) -> None:
        # One device runs one batch at a time, no batch waits for a window's end, and its inputs' shapes give its time.
        simple = settings.devices == 1 and not settings.pipelined and not settings.max_queue_delay
        # When it may; inf: never.
        self.allowed_from = -math.inf if simple and settings.steady else math.inf
        self._suspension = DoublingPause(_FIRST_SUSPENSION_SECONDS, _MAX_SUSPENSION_SECONDS)

    def disable(self) -> None:
        """Never run inline again: a run did not end by itself, and the submitting thread must not hang."""
        self.allowed_from = math.inf

    def suspend(self, now: float) -> None:
        """Run no batch inline for a while, because one took longer than `LONG_SECONDS`, whether or not it succeeded."""
        self.allowed_from = max(self.allowed_from, now + self._suspension.after(now))


class WorkerWakeup:
    """Wakes workers, and only those that have something to do. Guarded by the queue's lock.

    Waking a thread is the most expensive step of a request.
    """

    def __init__(
        self,
        clock: Clock,
        settings: BatcherSettings,
        backlog: Backlog,
        devices: Devices,
        returns: ReturnModel,
        expiry: Expiry,
    ) -> None:
        self._clock = clock
        self._settings = settings
        self._backlog = backlog
        self._devices = devices
        self._returns = returns
        self._expiry = expiry
        # Workers that wait for work.
        self._waiting = 0
        # No worker need be woken: none waits, or one was woken that has not asked for work since.
        self.pending = True
        # The device whose next batch waits for returning clients; until when, and until how many requests are queued.
        self._waits_for_returns: Device | None = None
        self._waits_until = -math.inf
        self._returns_wanted = 0
        # Later deadlines allow that wait.
        self._safe_deadline = math.inf
        # A batch may wait for more requests: for returning clients or, if there is one, in a window.
        self.waits_for_more = settings.max_queue_delay > 0

    def wait(self, device: Device, until: float) -> None:
        """Let a worker of a device wait for work, at most until `until`."""
        self._waiting += 1
        self.pending = False
        try:
            device.wait(self._clock, until)
        finally:
            self._waiting -= 1
            # Another worker that was woken takes what it finds, and wakes the next if something is left.
            self._wakeup_lost()
            self.wait_is_over(device)

    def wait_for_returns(self, device: Device, bucket: Bucket, until: float) -> Wait:
        """Return the decision that a device's next batch, of this bucket, waits until `until` for more requests."""
        self._waits_for_returns, self._waits_until, self.waits_for_more = device, until, True
        self._returns_wanted = self._returns.wanted
        safe = until + bucket.cost_model.upper(self._settings.batch_rows) + TIMER_SLACK
        self._safe_deadline = safe if bucket.earliest_deadline > safe else math.inf
        return Wait(until)

    def wait_is_over(self, device: Device) -> None:
        """Note that a device's next batch does not wait for returning clients any more, if it did."""
        if self._waits_for_returns is device:
            self._waits_for_returns = None
            self.waits_for_more = self._settings.max_queue_delay > 0

    def must_wake_for(self, bucket: Bucket, deadline: float) -> bool:
        """Return whether a batch that `waits_for_more` must be decided again, after a request was added to its bucket."""
        if self._waits_for_returns is not None:
            # Waking the worker for each request, so that it decides again, costs more.
            return (
                bucket.requests >= self._returns_wanted
                or len(self._backlog.queued_buckets) > 1
                or (
                    deadline <= self._safe_deadline and bucket.latest_start < self._waits_until - _MIN_EARLIER
                )
            )
        # A worker that waits out a window must see an expiry before its end, and a size at which the window ends.
        return deadline < math.inf or bool(self._settings.preferred_batch_sizes) or self._expiry.has_timeouts

    def wake(self, now: float) -> None:
        """Wake a worker of the device that can take a batch first, preferring an idle one.

        While a submitting thread runs a batch, no worker is woken: after it, that thread takes the next one or calls this.
        """
        each = self._devices.each
        if self.pending or each[0].run_inline:
            return
        self.pending = True
        if len(each) == 1:
            each[0].ready.notify()
        else:
            self._devices.wake(lambda device: max(now, self.next_dispatch_at(device, now)))

    def wake_for_backlog(self, now: float, *, wakeup_lost: bool = False) -> None:
        """Wake a worker for the queued requests, and the expiry thread in time for them.

        `wakeup_lost` says that a worker that was woken before may not have seen them.
        """
        if not self._backlog.rows:
            return
        if wakeup_lost:
            self._wakeup_lost()
        self.wake(now)
        if self._backlog.deadlines or self._expiry.has_timeouts:
            self._expiry.notify_by(self._expiry.next(now))

    def _wakeup_lost(self) -> None:
        """Allow the next `wake` to wake a worker, although one was woken before that may not have seen the work."""
        self.pending = not self._waiting

    def next_dispatch_at(self, device: Device, now: float) -> float:
        """Return when the next batch may be dispatched to a device whose last batch is not completed; inf: later.

        If clients return, that is decided when those of the last batch are answered: before, it is unknown whether
        to wait for them. A full batch does not wait for that. A busy device leaves the batch to an idle one.
        """
        if device.run_inline or (not device.idle and self._devices.has_idle_waiter):
            return math.inf
        if device.batches_outstanding and self._returns.expected:
            full = self._settings.batch_rows if self._settings.merge else 1
            if all(
                bucket.rows < min(full, bucket.full_rows) for bucket in self._backlog.queued_buckets.values()
            ):
                return math.inf
        return device.dispatch_at(now)
