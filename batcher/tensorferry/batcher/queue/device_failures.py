"""Device failures: the requests are queued again, other devices run them, and the device is recovered.

A device with an outage takes no batches. Its workers wait apart from the others; one of them recovers the
device when it is time to try.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

from tensorferry.batcher.clock import Clock
from tensorferry.batcher.errors import InstanceFailed
from tensorferry.batcher.queue.admission import Admission
from tensorferry.batcher.queue.devices import Device, Devices, Outage
from tensorferry.batcher.queue.request_states import RequestStates
from tensorferry.batcher.queue.wakeup import LONG_SECONDS, InlineExecution, WorkerWakeup
from tensorferry.batcher.request import BatchAssignment, Recover, Request

_INF = math.inf

# Batches that were dispatched before the failure hold device memory, so the recovery waits for them, but at most this
# long, in seconds: longer than any batch takes that does not hang.
_MAX_WAIT_FOR_BATCHES_SECONDS = 5.0


class DeviceFailures:
    """The outages of a queue's devices. Methods without `_locked` are thread-safe; `lock` is the queue's."""

    def __init__(
        self,
        lock: threading.Lock,
        clock: Clock,
        devices: Devices,
        admission: Admission,
        states: RequestStates,
        wakeup: WorkerWakeup,
        inline: InlineExecution,
    ) -> None:
        self._lock = lock
        self._clock = clock
        self._devices = devices
        self._admission = admission
        self._states = states
        self._wakeup = wakeup
        self._inline = inline

    def requeue_after_failure(
        self, batch: Sequence[Request], work: BatchAssignment, device: int, *, ran: bool, out: bool
    ) -> tuple[int, Sequence[Request]]:
        """Take back the requests of a batch, all or a part of an assignment's, that a device failed with.

        `ran` says that the device was running them; `out` that it must be recovered before it takes more. Returns how
        many requests are queued again, at the head, and no longer the caller's; and those that the caller must fail:
        they were queued again before, their deadline has passed, or no device is left to run them.
        """
        with self._lock:
            now, failed = self._clock.now(), self._devices.each[device]
            if out:
                self._devices.begin_outage(failed, now, now)
                # Workers that wait for a batch of this device must wait for its recovery instead.
                failed.ready.notify_all()
                self._devices.recovered_or_closed.notify_all()
            requeued, ended = self._states.requeue_running(batch, work, now, retried=ran)
            if requeued:
                self._wakeup.wake_for_backlog(now)
            return requeued, ended

    def wait_for_recovery_locked(self, device: Device, outage: Outage) -> Recover | None:
        """Let a worker wait during an outage; return `Recover` if it must recover the device, None to look again."""
        now, try_at = self._clock.now(), outage.try_at
        if device.batches_outstanding and outage.wait_for_batches:
            try_at = max(try_at, outage.began + _MAX_WAIT_FOR_BATCHES_SECONDS)
        if try_at <= now and not outage.recovering:
            outage.begin_recovery()
            return Recover()
        # This worker may have been woken instead of another, and it expires no requests while it waits here.
        self._wakeup.wake_for_backlog(now)
        self._clock.wait(self._devices.recovered_or_closed, _INF if outage.recovering else try_at)
        return None

    def worker_crashed(self, device: int, seconds: float, error: InstanceFailed | None) -> Sequence[Request]:
        """Start an outage of `seconds`, because a worker crashed.

        With an error it crashed too often: if no other device is left, all queued requests end with the error, and are
        handed out.
        """
        with self._lock:
            crashed, now = self._devices.each[device], self._clock.now()
            if crashed.outage is None:
                self._devices.begin_outage(crashed, now, now + seconds, wait_for_batches=False)
            crashed.ready.notify_all()
            self._devices.recovered_or_closed.notify_all()
            # Threads that were woken for this device's work may not have seen it.
            self._wakeup.wake_for_backlog(now, wakeup_lost=True)
            assert crashed.outage is not None
            if error is not None:
                return self._give_up_locked(crashed.outage, error)
            return self._states.hand_out_expired()

    def inline_run_crashed(self) -> Sequence[Request]:
        """Let workers take what is queued, because a submitting thread crashed while it ran a batch inline.

        Requests that it expired are handed out.
        """
        with self._lock:
            self._wakeup.wake_for_backlog(self._clock.now(), wakeup_lost=True)
            return self._states.hand_out_expired()

    def recovered(self, device: int) -> None:
        """End a device's outage."""
        with self._lock:
            self._recovered_locked(self._devices.each[device])

    def hung_run_returned(self, device: int) -> None:
        """End a device's outage, because the run that hung has returned; unless the device must be recovered first."""
        with self._lock:
            returned = self._devices.each[device]
            if returned.outage is not None and returned.outage.try_at == _INF:
                self._recovered_locked(returned)

    def _recovered_locked(self, device: Device) -> None:
        self._devices.end_outage(device)
        self._admission.accept_again()

    def not_recovered(self, device: int, error: InstanceFailed) -> Sequence[Request]:
        """Try to recover a device again after `error.retry_after` seconds.

        If no other device is left, all queued requests end, and are handed out.
        """
        with self._lock:
            outage = self._devices.each[device].outage
            assert outage is not None
            outage.retry_at(self._clock.now() + error.retry_after)
            self._devices.recovered_or_closed.notify_all()
            return self._give_up_locked(outage, error)

    def abort_hung_run(self, device: int, error: InstanceFailed) -> Sequence[Request]:
        """Start an outage that lasts until a device's model function returns. The rest is as for `not_recovered`."""
        with self._lock:
            self._inline.disable()
            hung = self._devices.each[device]
            outage = self._devices.begin_outage(hung, self._clock.now(), _INF)
            hung.ready.notify_all()
            return self._give_up_locked(outage, error)

    def _give_up_locked(self, outage: Outage, error: InstanceFailed) -> Sequence[Request]:
        """End all queued requests and reject new ones if no device's outage has a known end."""
        outage.give_up()
        ended: Sequence[Request] = ()
        if all(device.outage is not None and device.outage.unrecoverable for device in self._devices.each):
            self._admission.reject_all(error)
            ended = self._states.end_all_queued()
        return self._states.hand_out_expired(ended)

    def inline_run_too_long(self, device: int, since: float) -> bool:
        """Return whether a submitting thread has been busy with a batch since then for too long."""
        with self._lock:
            return self._devices.each[device].run_inline and self._clock.now() - since > LONG_SECONDS

    def run_timed_out(self) -> None:
        """Run no more batches inline, because a run took too long and was ended."""
        with self._lock:
            self._inline.disable()
