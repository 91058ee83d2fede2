"""What the queue does when a device fails: its requests go back, others take them, and it is brought back.

A device that is out takes no batches. Its workers do not wait with those of the others, so that nothing else in
the queue knows of it; one of them is handed `RECOVER` whenever it is time to try to bring the device back.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Hashable, Sequence
from typing import Final

from tensorferry.batcher.backlog import Backlog
from tensorferry.batcher.clock import Clock
from tensorferry.batcher.device import Device, Devices, Outage
from tensorferry.batcher.errors import InstanceFailed
from tensorferry.batcher.memory import RowLimits
from tensorferry.batcher.request import DONE, QUEUED, RUNNING, Request
from tensorferry.batcher.timeouts import Timeouts
from tensorferry.batcher.work import Work

# Not work, but that the worker is to bring its device back.
RECOVER: Final = Work((), None, ())

_INF = math.inf


class Outages:
    """The part of the queue that is about failures. Every method without `_locked` is thread-safe."""

    _lock: threading.Lock
    _clock: Clock
    _devices: Devices
    _backlog: Backlog
    _timeouts: Timeouts | None
    _row_limits: RowLimits
    _running: int
    _held_bytes: int
    _busy_workers: int
    _closing: bool
    # A device is back, or the queue may have ended. Waited for by the workers of devices that are out.
    _back: threading.Condition
    # What every new request is refused with while no device is expected back.
    _broken: InstanceFailed | None
    # Nothing goes back into the queue any more: nobody may be left to run it.
    _abandoned: bool

    def _wake_locked(self, now: float) -> None:
        raise NotImplementedError

    def _watch_locked(self, due: float) -> None:
        raise NotImplementedError

    def _next_expiry_locked(self, now: float) -> float:
        raise NotImplementedError

    def _end_queued_locked(self, request: Request) -> None:
        raise NotImplementedError

    def _tell_if_done_locked(self) -> None:
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
                if mine.outage is None:
                    mine.outage = Outage(now)
                mine.outage.try_at = min(mine.outage.try_at, now)
                # Who waits there for a batch waits elsewhere now.
                mine.ready.notify_all()
                self._back.notify_all()
            back: list[Request] = []
            ended: list[Request] = []
            for request in batch:
                if request.state is not RUNNING:
                    continue
                lost = self._abandoned or self._broken is not None
                if lost or request.deadline <= now or (ran and request.retried):
                    request.state = DONE
                    self._held_bytes -= request.nbytes
                    ended.append(request)
                else:
                    request.state = QUEUED
                    request.started = math.nan
                    request.retried = request.retried or ran
                    back.append(request)
            self._running -= len(back) + len(ended)
            if back:
                self._backlog.put_back(back)
                if self._timeouts is not None:
                    # Their time in the queue was over when they left it.
                    self._timeouts.forget(back)
                self._wake_locked(now)
                self._watch_locked(self._next_expiry_locked(now))
            return back, ended

    def _stand_by_locked(self, mine: Device, outage: Outage) -> Work | None:
        """Waits while a device is out; RECOVER when its worker is to bring it back, None to look again."""
        now = self._clock.now()
        if outage.try_at <= now and not outage.trying:
            outage.trying = True
            return RECOVER
        # This one may have been woken in another's stead, and looks after no deadlines any more.
        if self._backlog.rows:
            self._wake_locked(now)
            self._watch_locked(self._next_expiry_locked(now))
        self._clock.wait(self._back, _INF if outage.trying else outage.try_at)
        return None

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
        mine.outage = None
        self._broken = None
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
            mine = self._devices.each[device]
            if mine.outage is None:
                mine.outage = Outage(_INF)
            mine.ready.notify_all()
            return self._give_up_locked(mine.outage, error)

    def _give_up_locked(self, outage: Outage, error: InstanceFailed) -> Sequence[Request]:
        outage.hopeless = True
        if not all(device.outage is not None and device.outage.hopeless for device in self._devices.each):
            return ()
        self._broken = InstanceFailed(str(error), error.retry_after)
        queued = [request for bucket in self._backlog.buckets.values() for request in bucket]
        if queued:
            # Not done before they are completed: drain waits for that.
            self._busy_workers += 1
        for request in queued:
            self._end_queued_locked(request)
        return queued

    def did_not_fit(self, batch: Sequence[Request], device: int) -> None:
        """A batch, or a part of one, was too large for a device's memory."""
        rows = sum([request.cost for request in batch])
        with self._lock:
            self._row_limits.did_not_fit(device, batch[0].key, rows, self._clock.now())

    def fitted(self, batch: Sequence[Request], device: int, seconds: float) -> None:
        """A part of a batch that had been too large ran, for so many seconds."""
        rows = sum([request.cost for request in batch])
        with self._lock:
            self._row_limits.fitted(device, batch[0].key, rows)
            self._backlog.profile(batch[0].key).observe(self._clock.now(), rows, seconds)

    @property
    def limits_rows(self) -> bool:
        """Whether any device has had too large a batch for its memory lately."""
        return bool(self._row_limits)

    def rows_that_fit(self, device: int, key: Hashable) -> int:
        """The most rows of a bucket's batch that are known to fit into a device's memory."""
        with self._lock:
            return self._row_limits.rows(device, key)

    def _no_outages(self) -> None:
        """As it is at the start."""
        self._back = threading.Condition(self._lock)
        self._broken = None
        self._abandoned = False
