"""What the queue does when a device fails: its requests go back, others take them, and it is brought back.

A device that is out takes no batches. Its workers do not wait with those of the others, so that nothing else in
the queue knows of it; one of them is handed `RECOVER` whenever it is time to try to bring the device back.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Final

from tensorferry.batcher.clock import Clock
from tensorferry.batcher.errors import InstanceFailed
from tensorferry.batcher.queue.admission import Admission
from tensorferry.batcher.queue.backlog import Backlog
from tensorferry.batcher.queue.devices import Device, Devices, Outage
from tensorferry.batcher.queue.dispatch import Dispatch
from tensorferry.batcher.queue.endings import Ends
from tensorferry.batcher.queue.expiry import Expiry
from tensorferry.batcher.queue.inline_execution import InlineExecution
from tensorferry.batcher.queue.wakeup import WorkerWakeup
from tensorferry.batcher.request import QUEUED, RUNNING, BatchAssignment, Request

# Not work, but that the worker is to bring its device back.
RECOVER: Final = BatchAssignment((), None, ())

_INF = math.inf

# So long, in seconds, a device is not brought back while a batch is in hand that left for it before it failed, be it
# to be handed back: what that has of the device's memory is to be free first. More than any takes but one that hangs.
_CLEAR_SECONDS = 5.0


class DeviceFailures:
    """Every method without `_locked` is thread-safe; `lock` is the queue's."""

    def __init__(
        self,
        lock: threading.Lock,
        clock: Clock,
        backlog: Backlog,
        devices: Devices,
        admission: Admission,
        expiry: Expiry,
        waking: WorkerWakeup,
        lending: InlineExecution,
        dispatch: Dispatch,
        ends: Ends,
    ) -> None:
        self._lock = lock
        self._clock = clock
        self._backlog = backlog
        self._devices = devices
        self._admission = admission
        self._expiry = expiry
        self._waking = waking
        self._lending = lending
        self._dispatch = dispatch
        self._ends = ends

    def hand_back(
        self, batch: Sequence[Request], device: int, *, ran: bool, out: bool
    ) -> tuple[Sequence[Request], Sequence[Request]]:
        """A device failed with requests that it was given; if `out`, it is to be brought back before it gets more.

        `ran` says that they were on it when it did. Returns those that are queued again, at the head, which
        belong to others from now on; and those that the caller fails: they were queued again before, their time
        is over, or nobody is left to run them.
        """
        with self._lock:
            now, mine = self._clock.now(), self._devices.each[device]
            if out:
                outage = self._devices.out(mine, now, now)
                outage.try_at = min(outage.try_at, now)
                # Who waits there for a batch waits elsewhere now.
                mine.ready.notify_all()
                self._devices.back_or_done.notify_all()
            back: list[Request] = []
            ended: list[Request] = []
            for request in batch:
                if request.state is not RUNNING:
                    continue
                lost = self._ends.abandoned or self._admission.broken is not None
                if lost or request.deadline <= now or (ran and request.retried):
                    self._ends.release(request)
                    ended.append(request)
                else:
                    request.state = QUEUED
                    request.started = math.nan
                    request.retried = request.retried or ran
                    back.append(request)
            self._ends.running -= len(back) + len(ended)
            if back:
                self._backlog.put_back(back)
                if self._expiry.timeouts is not None:
                    # Their time in the queue was over when they left it.
                    self._expiry.timeouts.forget(back)
                self._dispatch.tell_of_queued(now)
            return back, ended

    def stand_by_locked(self, mine: Device, outage: Outage) -> BatchAssignment | None:
        """Waits while a device is out; RECOVER when its worker is to bring it back, None to look again."""
        now = self._clock.now()
        clears = mine.unanswered and outage.clears
        try_at = max(outage.try_at, outage.began + _CLEAR_SECONDS) if clears else outage.try_at
        if try_at <= now and not outage.trying:
            outage.trying = True
            return RECOVER
        # This one may have been woken in another's stead, and looks after no deadlines any more.
        if self._backlog.rows:
            self._dispatch.tell_of_queued(now)
        self._clock.wait(self._devices.back_or_done, _INF if outage.trying else try_at)
        return None

    def fell(self, device: int, seconds: float, error: InstanceFailed | None) -> Sequence[Request]:
        """A worker of a device ended unexpectedly: it takes no batches for so many seconds, and then tries again.

        With an error it did so too often; where no other device is left, what is queued ends with that. The caller
        fails those that this returns, and then says so by `expired_completed`, if there are any.
        """
        with self._lock:
            mine, now = self._devices.each[device], self._clock.now()
            if mine.outage is None:
                self._devices.out(mine, now, now + seconds).clears = False
                if not mine.unanswered:
                    mine.forget()
            mine.ready.notify_all()
            self._devices.back_or_done.notify_all()
            # Those who wait for deadlines, or for work of other devices, may have been told of it in vain.
            if self._backlog.rows:
                self._waking.asked = not self._waking.waiting
                self._dispatch.tell_of_queued(now)
            assert mine.outage is not None
            return self._orphaned_locked(
                self._give_up_locked(mine.outage, error) if error is not None else ()
            )

    def dropped(self) -> Sequence[Request]:
        """A thread that is no worker fell while it took work, or ran it: workers take what is queued.

        The caller fails those that this returns, as with `fell`.
        """
        with self._lock:
            if self._backlog.rows:
                self._waking.asked = not self._waking.waiting
                self._dispatch.tell_of_queued(self._clock.now())
            return self._orphaned_locked(())

    def _orphaned_locked(self, ended: Sequence[Request]) -> Sequence[Request]:
        orphans = self._dispatch.orphaned()
        if orphans and not ended:
            # As for those that are given up.
            self._ends.busy += 1
        return [*ended, *orphans]

    def recovered(self, device: int) -> None:
        """A device is back."""
        with self._lock:
            self._recovered_locked(self._devices.each[device])

    def returned(self, device: int) -> None:
        """A run that was given up has returned: its device is back, unless it is to be brought back first."""
        with self._lock:
            mine = self._devices.each[device]
            if mine.outage is not None and mine.outage.try_at == _INF:
                self._recovered_locked(mine)

    def _recovered_locked(self, mine: Device) -> None:
        self._devices.back(mine)
        self._admission.refuse_no_more()
        self._devices.back_or_done.notify_all()

    def not_recovered(self, device: int, error: InstanceFailed) -> Sequence[Request]:
        """A device could not be brought back; the next try is after `error.retry_after` seconds.

        Where no other is left, this ends and returns what is queued: the caller fails it, and then says so by
        `expired_completed`, if it is anything at all.
        """
        with self._lock:
            outage = self._devices.each[device].outage
            assert outage is not None
            outage.trying = False
            outage.try_at = self._clock.now() + error.retry_after
            self._devices.back_or_done.notify_all()
            return self._give_up_locked(outage, error)

    def give_up(self, device: int, error: InstanceFailed) -> Sequence[Request]:
        """A device's function does not return: it takes no batches until it does. The rest as `not_recovered`."""
        with self._lock:
            self._lending.never_again()
            mine = self._devices.each[device]
            outage = self._devices.out(mine, self._clock.now(), _INF)
            mine.ready.notify_all()
            return self._give_up_locked(outage, error)

    def _give_up_locked(self, outage: Outage, error: InstanceFailed) -> Sequence[Request]:
        outage.hopeless = True
        if not all(device.outage is not None and device.outage.hopeless for device in self._devices.each):
            return ()
        self._admission.refuse(error)
        queued = self._ends.end_all_queued()
        if queued:
            # Not done before they are completed: drain waits for that.
            self._ends.busy += 1
        return queued

    def timed_out(self) -> None:
        """A run was ended, since it took too long."""
        with self._lock:
            self._lending.never_again()
