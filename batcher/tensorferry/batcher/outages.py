"""What the queue does when a device fails: its requests go back, others take them, and it is brought back.

A device that is out takes no batches. Its workers do not wait with those of the others, so that nothing else in
the queue knows of it; one of them is handed `RECOVER` whenever it is time to try to bring the device back.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Hashable, Sequence
from typing import Final

from tensorferry.batcher.admission import Admission
from tensorferry.batcher.backlog import Backlog
from tensorferry.batcher.clients import Quotas
from tensorferry.batcher.clock import Clock
from tensorferry.batcher.departure import Departure
from tensorferry.batcher.device import Device, Devices, Outage
from tensorferry.batcher.errors import InstanceFailed
from tensorferry.batcher.expiry import Expiry
from tensorferry.batcher.lending import Lending
from tensorferry.batcher.request import DONE, QUEUED, RUNNING, Request
from tensorferry.batcher.waking import Waking
from tensorferry.batcher.work import Work

# Not work, but that the worker is to bring its device back.
RECOVER: Final = Work((), None, ())

_INF = math.inf

# So long, in seconds, a device is not brought back while a batch is in hand that left for it before it failed, be it
# to be handed back: what that has of the device's memory is to be free first. More than any takes but one that hangs.
_CLEAR_SECONDS = 5.0


class Outages:
    """The part of the queue that is about failures. Every method without `_locked` is thread-safe."""

    _lock: threading.Lock
    _clock: Clock
    _devices: Devices
    _backlog: Backlog
    _admission: Admission
    _expiry: Expiry
    _departure: Departure
    _waking: Waking
    _lending: Lending
    _quotas: Quotas | None
    _lessons: threading.Lock
    _running: int
    _busy_workers: int
    _closing: bool
    # A device is back, or the queue may have ended. Waited for by the workers of devices that are out.
    _back: threading.Condition
    # Nothing goes back into the queue any more: nobody may be left to run it.
    _abandoned: bool
    # Ended by a thread that takes work, which has yet to hand them out.
    _dying: Sequence[Request]
    # The same, once it fell before it could.
    _orphans: list[Request]

    def _end_queued_locked(self, request: Request) -> None:
        raise NotImplementedError

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
                self._back.notify_all()
            back: list[Request] = []
            ended: list[Request] = []
            for request in batch:
                if request.state is not RUNNING:
                    continue
                lost = self._abandoned or self._admission.broken is not None
                if lost or request.deadline <= now or (ran and request.retried):
                    request.state = DONE
                    self._admission.held_bytes -= request.nbytes
                    if self._quotas is not None:
                        self._quotas.done(request)
                    ended.append(request)
                else:
                    request.state = QUEUED
                    request.started = math.nan
                    request.retried = request.retried or ran
                    back.append(request)
            self._running -= len(back) + len(ended)
            if back:
                self._backlog.put_back(back)
                if self._expiry.timeouts is not None:
                    # Their time in the queue was over when they left it.
                    self._expiry.timeouts.forget(back)
                self._tell_of_queued_locked(now)
            return back, ended

    def _tell_of_queued_locked(self, now: float) -> None:
        """Something is queued of which others may not know."""
        self._waking.wake(now)
        if self._expiry.needed:
            self._expiry.watch(self._expiry.next(now))

    def _stand_by_locked(self, mine: Device, outage: Outage) -> Work | None:
        """Waits while a device is out; RECOVER when its worker is to bring it back, None to look again."""
        now = self._clock.now()
        clears = mine.unanswered and outage.clears
        try_at = max(outage.try_at, outage.began + _CLEAR_SECONDS) if clears else outage.try_at
        if try_at <= now and not outage.trying:
            outage.trying = True
            return RECOVER
        # This one may have been woken in another's stead, and looks after no deadlines any more.
        if self._backlog.rows:
            self._tell_of_queued_locked(now)
        self._clock.wait(self._back, _INF if outage.trying else try_at)
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
            self._back.notify_all()
            # Those who wait for deadlines, or for work of other devices, may have been told of it in vain.
            if self._backlog.rows:
                self._waking.asked = not self._waking.waiting
                self._tell_of_queued_locked(now)
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
                self._tell_of_queued_locked(self._clock.now())
            return self._orphaned_locked(())

    def _orphaned_locked(self, ended: Sequence[Request]) -> Sequence[Request]:
        orphans, self._orphans = self._orphans, []
        if orphans and not ended:
            # As for those that are given up.
            self._busy_workers += 1
        return [*ended, *orphans]

    def _orphan_locked(self) -> None:
        """Who takes work fell: those that it had ended are told by whoever puts that right."""
        self._orphans += self._dying
        self._dying = ()

    def _back_in_line_locked(self, requests: Sequence[Request]) -> None:
        """They were taken out of the queue in vain."""
        for request in requests:
            request.state = QUEUED
            request.started = math.nan
        self._backlog.put_back(requests)

    def stand_off(self, seconds: float) -> None:
        """Waits for so long, or until the queue closes or somebody has something for who takes the expired."""
        with self._lock:
            self._clock.wait(self._expiry.due, self._clock.now() + seconds)

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
        self._back.notify_all()

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
            self._back.notify_all()
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
        queued = [request for bucket in self._backlog.buckets.values() for request in bucket]
        if queued:
            # Not done before they are completed: drain waits for that.
            self._busy_workers += 1
        for request in queued:
            self._end_queued_locked(request)
        return queued

    def timed_out(self) -> None:
        """A run was ended, since it took too long."""
        with self._lock:
            self._lending.never_again()

    def did_not_fit(self, batch: Sequence[Request], device: int) -> None:
        """A batch, or a part of one, was too large for a device's memory."""
        rows = sum([request.cost for request in batch])
        with self._lock:
            self._departure.row_limits.did_not_fit(device, batch[0].key, rows, self._clock.now())

    def fitted(self, batch: Sequence[Request], device: int, seconds: float) -> None:
        """A part of a batch that had been too large ran, for so many seconds."""
        rows = sum([request.cost for request in batch])
        with self._lessons, self._lock:
            now, devices = self._clock.now(), self._devices
            self._departure.row_limits.fitted(device, batch[0].key, rows)
            profile = self._backlog.profile(batch[0].key)
            alike: float | None = seconds
            if len(devices.each) > 1:
                alike = devices.paced(devices.each[device], seconds, profile.device.mean(rows), now)
            if alike is not None:
                profile.observe(now, rows, alike)

    @property
    def limits_rows(self) -> bool:
        """Whether any device has had too large a batch for its memory lately."""
        return self._departure.row_limits.needed

    def rows_that_fit(self, device: int, key: Hashable) -> int:
        """The most rows of a bucket's batch that are known to fit into a device's memory."""
        with self._lock:
            return self._departure.row_limits.rows(device, key)

    def _no_outages(self) -> None:
        """As it is at the start."""
        self._back = threading.Condition(self._lock)
        self._abandoned = False
        self._dying = ()
        self._orphans = []
