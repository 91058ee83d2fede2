"""Waking: which worker must hear of a request, and for whom a batch may leave.

To wake a thread costs more than all else that is done for a request, so nobody is woken in vain.
"""

from __future__ import annotations

import math

from tensorferry.batcher.clock import Clock
from tensorferry.batcher.policy.close_rule import Wait
from tensorferry.batcher.queue.backlog import Backlog
from tensorferry.batcher.queue.bucket import Bucket
from tensorferry.batcher.queue.devices import Device, Devices
from tensorferry.batcher.queue.reply_wait import ReplyWait
from tensorferry.batcher.settings import Limits

# A timed wait is not cut short for less, in seconds.
_LEAST_SOONER = 100e-6


class WorkerWakeup:
    """Who waits for work or for company. Guarded by the queue's lock.

    `alert` says that requests may expire in ways of which only an idle worker hears in time.
    """

    __slots__ = (
        "_alert",
        "_backlog",
        "_clock",
        "_company",
        "_company_for",
        "_company_until",
        "_devices",
        "_limits",
        "asked",
        "waiting",
    )

    def __init__(
        self,
        clock: Clock,
        limits: Limits,
        backlog: Backlog,
        devices: Devices,
        company: ReplyWait,
        *,
        alert: bool,
    ) -> None:
        self._clock = clock
        self._limits = limits
        self._backlog = backlog
        self._devices = devices
        self._company = company
        self._alert = alert
        # Threads that wait for work.
        self.waiting = 0
        # None of them need hear of a request: nobody waits, or one was woken that has not asked for work since.
        self.asked = True
        # Until when an idle worker waits for company, and for which device; -inf when none does.
        self._company_until = -math.inf
        self._company_for: Device | None = None

    def wait(self, device: Device, until: float) -> None:
        """A worker of a device waits for work, at most to `until`."""
        device.waiting += 1
        self.waiting += 1
        self.asked = False
        try:
            self._clock.wait(device.ready, until)
        finally:
            device.waiting -= 1
            self.waiting -= 1
            # Another that was woken takes what it finds, and wakes the next if something is left.
            self.asked = not self.waiting
            self._company.awaits = False
            if self._company_for is device:
                self._company_until, self._company_for = -math.inf, None

    def wait_for_company(self, device: Device, until: float) -> Wait:
        """A device's next batch waits for those who are here already, or come back soon."""
        self._company_until, self._company_for = until, device
        return Wait(until)

    def concerns(self, bucket: Bucket, rows: int, deadline: float, now: float) -> bool:
        """Whether a waiting worker must hear of a request of so many rows that was put into the bucket."""
        room = self._limits.max_batch_size - bucket.rows
        if bucket.rows == rows or room <= 0 or self._company.awaits:
            return True
        if self._company_for is not None:
            # Decided here, where it is known, rather than by waking the worker for each.
            if len(self._backlog.buckets) > 1:
                return True
            return self._company.returners_until(bucket, now, room) < self._company_until - _LEAST_SOONER
        # A worker that waits out a window must hear of an expiry before its end, and of a size
        # at which the window ends.
        return self._limits.max_queue_delay > 0 and (
            deadline < math.inf or bool(self._limits.preferred) or self._alert
        )

    def wake(self, now: float) -> None:
        """Wakes the worker that may take a batch the soonest, of an idle device if one waits there."""
        if self.asked:
            return
        self.asked = True
        each = self._devices.each
        if len(each) == 1:
            each[0].ready.notify()
        else:
            self._devices.wake(lambda device: max(now, self.turn(device, now)))

    def turn(self, device: Device, now: float) -> float:
        """When the next batch may leave for a device whose last is unanswered.

        Where callers come back, it is asked again when those of the last batch are answered:
        before, nobody knows whether to wait for them. Unless a full batch waits anyway. And a
        device that is busy leaves the batch to one that is not.
        """
        if not device.idle and self._devices.idle_waits():
            return math.inf
        if device.borrowed:
            return math.inf
        if device.unanswered and self._company.returners.expected:
            full = self._limits.full
            if all(bucket.rows < full for bucket in self._backlog.buckets.values()):
                return math.inf
        return device.turn(now)
