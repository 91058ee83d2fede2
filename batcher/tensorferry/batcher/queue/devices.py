"""Devices as the queue sees them: what each has in flight, when it will be free, and its waiting workers."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tensorferry.batcher.clock import Clock

# A timed wait ends a little late, in seconds. The next batch is better prepared too early than too late.
_TIMER_SLACK = 300e-6


@dataclass(slots=True)
class Outage:
    """The time in which a device takes no batches, because its model function is broken. Guarded by the queue's lock.

    The recovery is tried at `try_at`, inf while a hung run has not returned. If it is to `wait_for_batches`, those that were
    dispatched before are completed first, so that their device memory is free. The end of an `unrecoverable` outage is
    unknown: a recovery failed, or a run hangs.
    """

    began: float
    try_at: float
    wait_for_batches: bool
    # One of the device's workers is recovering it.
    recovering: bool = False
    unrecoverable: bool = False

    def begin_recovery(self) -> None:
        """Note that a worker is recovering the device."""
        self.recovering = True

    def retry_at(self, time: float) -> None:
        """Note that a recovery failed, and when to try the next."""
        self.recovering = False
        self.try_at = time

    def give_up(self) -> None:
        """Note that the end of the outage is unknown."""
        self.unrecoverable = True


class Device:
    """A model function's device: its batches in flight and its waiting workers. Guarded by the queue's lock.

    Without pipelining a batch is in flight until its requests are completed, so the device is idle whenever its worker
    asks for the next. With pipelining one batch may be joined or completed while the device runs another: at most two
    are in flight.
    """

    def __init__(self, lock: threading.Lock) -> None:
        # A batch may be dispatched to this device. `waiting` workers wait for it.
        self.ready = threading.Condition(lock)
        self.waiting = 0
        # The submitting thread dispatches and runs a batch instead of the worker, which waits meanwhile.
        self.run_inline = False
        # None while the device takes batches.
        self.outage: Outage | None = None
        # Batches that were dispatched and whose requests are not all completed.
        self.batches_outstanding = 0
        # How long the host was expected to prepare the last batch, in seconds.
        self.host_lead_time = 0.0
        # The expected device time of each batch in flight, in seconds, the running batch first.
        self.in_flight: deque[float] = deque()
        # When they should have run, if there are any.
        self.free_at = -math.inf

    @property
    def idle(self) -> bool:
        """Return whether no batch is in flight."""
        return not self.in_flight

    def start_at(self, now: float) -> float:
        """Return from when on a batch that is dispatched now needs to wait for no other."""
        if not self.in_flight:
            return now
        return max(now, self.free_at - self.host_lead_time)

    def dispatch_at(self, now: float) -> float:
        """Return when to dispatch the next batch, so that it is prepared just in time."""
        return max(now, self.free_at) - self.host_lead_time - _TIMER_SLACK if self.in_flight else now

    def undo_dispatch(self) -> None:
        """Take back the last `dispatched`."""
        self.in_flight.pop()
        self.batches_outstanding -= 1

    def batch_done(self) -> None:
        """Note that the requests of a batch are completed."""
        self.batches_outstanding -= 1
        if not self.batches_outstanding:
            # The worker of a pipelined device that crashed has not called `run_done`.
            self.in_flight.clear()

    def wait(self, clock: Clock, until: float) -> None:
        """Let a worker wait for `ready`, at most until `until`."""
        self.waiting += 1
        try:
            clock.wait(self.ready, until)
        finally:
            self.waiting -= 1


class Devices:
    """The devices that take batches from one queue. Guarded by the queue's lock.

    Estimates count the `available` devices only.
    """

    def __init__(self, lock: threading.Lock, count: int) -> None:
        # An outage has ended or changed, or the queue may have ended. The workers of devices with an outage wait for it.
        self.recovered_or_closed = threading.Condition(lock)
        self.each = [Device(lock) for _ in range(count)]
        # Those without an outage; all devices if none is left, because they are expected back.
        self.available = self.each
        # When the first available device can start a batch that is dispatched to it, in the past while one is idle. None
        # until `find_next_start`, because only requests with deadlines need it.
        self.next_start: float | None = None

    def find_next_start(self, now: float) -> float:
        """Return `next_start`, after a batch was dispatched or has run."""
        self.next_start = min([device.start_at(now) for device in self.available])
        return self.next_start

    def begin_outage(
        self, device: Device, now: float, try_at: float, *, wait_for_batches: bool = True
    ) -> Outage:
        """Start an outage of a device; if one goes on already, try to recover it at `try_at` at the latest."""
        outage = device.outage or Outage(now, try_at, wait_for_batches)
        outage.try_at = min(outage.try_at, try_at)
        device.outage = outage
        self._count_available()
        return outage

    def end_outage(self, device: Device) -> None:
        """Let a device take batches again."""
        device.outage = None
        self._count_available()
        self.recovered_or_closed.notify_all()

    def _count_available(self) -> None:
        self.available = [device for device in self.each if device.outage is None] or self.each
        self.next_start = None

    def dispatched(self, device: Device, now: float, seconds: float, host_lead_time: float = 0.0) -> None:
        """Note a batch that keeps a device for `seconds`, after `host_lead_time` seconds of preparation."""
        ready = now + host_lead_time
        device.free_at = (max(device.free_at, ready) if device.in_flight else ready) + seconds
        device.host_lead_time = host_lead_time
        device.in_flight.append(seconds)
        device.batches_outstanding += 1
        self.next_start = None

    def completed(self, device: Device, now: float) -> None:
        """Note that a device has run a batch."""
        in_flight = device.in_flight
        in_flight.popleft()
        device.free_at = now + sum(in_flight) if in_flight else now
        self.next_start = None

    def wake(self, dispatch_at: Callable[[Device], float]) -> None:
        """Wake a worker of the device with the earliest `dispatch_at`, preferring an idle one."""
        waiting = [device for device in self.each if device.waiting]
        if len(waiting) > 1:
            waiting.sort(key=lambda device: (dispatch_at(device), not device.idle))
        if waiting:
            waiting[0].ready.notify()

    def wake_idle(self) -> None:
        """Wake a worker of an idle device, if one waits."""
        for device in self.each:
            if device.idle and device.waiting:
                device.ready.notify()
                return

    def notify_all(self) -> None:
        """Wake every worker."""
        for device in self.each:
            device.ready.notify_all()
        self.recovered_or_closed.notify_all()

    @property
    def has_idle_waiter(self) -> bool:
        """Return whether a worker of an idle device waits."""
        return any(device.idle and device.waiting for device in self.each)

    @property
    def has_free_waiter(self) -> bool:
        """Return whether a worker waits that will wake before a deadline is missed.

        A worker whose device's last batch is not completed does not count: it may wait for just that.
        """
        return any(device.waiting and not device.batches_outstanding for device in self.each)
