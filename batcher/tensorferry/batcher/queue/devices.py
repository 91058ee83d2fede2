"""Devices as the queue sees them: what is in flight on each, when it will be free, whose worker is woken."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable

# A timed wait wakes up late by a little: better that the next batch is ready too early.
_GUARD = 300e-6


class Outage:
    """A device that takes no batches, since what runs them there is broken. Guarded by the queue's lock.

    `try_at` is when to try to bring it back; inf when its run has been given up, and it is back when that returns.
    """

    __slots__ = ("began", "clears", "hopeless", "try_at", "trying")

    def __init__(self, began: float, try_at: float) -> None:
        self.began = began
        self.try_at = try_at
        # What it was given before is answered first, so that its memory is free.
        self.clears = True
        # One of its workers tries now.
        self.trying = False
        # It was tried in vain, or does not even return: nobody knows when it is back.
        self.hopeless = False


class Device:
    """Guarded by the queue's lock, on which `ready` is built.

    Without pipelining a batch is in flight until its requests are completed, so the device
    is idle whenever its worker asks for the next. With it, one batch may be prepared or
    completed by one worker while the device runs another's: two in flight at most.
    """

    __slots__ = (
        "_free_at",
        "_in_flight",
        "borrowed",
        "outage",
        "preparation",
        "ready",
        "unanswered",
        "waiting",
    )

    def __init__(self, lock: threading.Lock) -> None:
        # A batch may leave for this device. Waited for by its workers, `waiting` of them.
        self.ready = threading.Condition(lock)
        self.waiting = 0
        # Somebody else runs a batch in the stead of its worker, which waits meanwhile.
        self.borrowed = False
        # Why and until when it takes no batches; None while it does.
        self.outage: Outage | None = None
        # Batches that left and whose requests are not all completed.
        self.unanswered = 0
        # How long the last batch was expected to be prepared by the host, in seconds.
        self.preparation = 0.0
        # How long each batch in flight should keep the device, in seconds, the running one first.
        self._in_flight: deque[float] = deque()
        self._free_at = -math.inf

    @property
    def idle(self) -> bool:
        """Whether no batch is in flight."""
        return not self._in_flight

    def free_at(self, now: float) -> float:
        """When it should have run what is in flight."""
        return max(now, self._free_at) if self._in_flight else now

    def starts(self, now: float) -> float:
        """The time from which on a batch that leaves now is on its way without waiting, at the latest."""
        if not self._in_flight:
            return now
        return max(now, self._free_at - self.preparation)

    def turn(self, now: float) -> float:
        """When the next batch should leave, to be prepared just in time."""
        return self.free_at(now) - self.preparation - _GUARD if self._in_flight else now

    def left(self, now: float, seconds: float) -> None:
        """A batch left that keeps the device for so many seconds."""
        ready = now + self.preparation
        self._free_at = (max(self._free_at, ready) if self._in_flight else ready) + seconds
        self._in_flight.append(seconds)
        self.unanswered += 1

    def released(self, now: float) -> None:
        """The device has run its batch."""
        in_flight = self._in_flight
        in_flight.popleft()
        self._free_at = now + sum(in_flight) if in_flight else now

    def unsay(self) -> None:
        """The batch that was said to have left last has not."""
        self._in_flight.pop()
        self.unanswered -= 1

    def forget(self) -> None:
        """Nothing is in flight any more, whatever was said."""
        self._in_flight.clear()


class Devices:
    """The devices that pull from one queue. Guarded by the queue's lock.

    What is said of what they can do, and of who is waited for, is of those that `work`: nothing is promised in
    the name of one that is out.
    """

    __slots__ = ("_next_start", "back_or_done", "each", "work")

    def __init__(self, lock: threading.Lock, number: int) -> None:
        # A device is back, or the queue may have ended. Waited for by the workers of devices that are out.
        self.back_or_done = threading.Condition(lock)
        self.each = [Device(lock) for _ in range(number)]
        # Those that are not out; all when none is left, as they are expected back.
        self.work = self.each
        # When the first can start on what it is given, long ago while one is idle; None until it
        # is asked for again: only deadlines need it.
        self._next_start: float | None = None

    def next_start(self, now: float) -> float:
        """From when on one of them can start on what it is given."""
        if self._next_start is None:
            self._next_start = min([device.starts(now) for device in self.work])
        return self._next_start if self._next_start > now else now

    def out(self, device: Device, now: float, try_at: float) -> Outage:
        """One of them takes no batches any more. Its outage, which it may have had."""
        if device.outage is None:
            device.outage = Outage(now, try_at)
            self._count()
        return device.outage

    def back(self, device: Device) -> None:
        """It takes batches again."""
        device.outage = None
        self._count()

    def _count(self) -> None:
        self.work = [device for device in self.each if device.outage is None] or self.each
        self._next_start = None

    def left(self, device: Device, now: float, seconds: float) -> None:
        """A batch left for one of them that keeps it for so many seconds."""
        device.left(now, seconds)
        self._next_start = None

    def released(self, device: Device, now: float) -> None:
        """One of them has run its batch."""
        device.released(now)
        self._next_start = None

    def wake(self, soonest: Callable[[Device], float]) -> None:
        """Wakes a worker of the one that may take a batch the soonest, of equals the idle."""
        waiting = [device for device in self.each if device.waiting]
        if len(waiting) > 1:
            waiting.sort(key=lambda device: (soonest(device), not device.idle))
        if waiting:
            waiting[0].ready.notify()

    def wake_idle(self) -> None:
        """Wakes a worker of one that could start at once, if one waits there."""
        for device in self.each:
            if device.idle and device.waiting:
                device.ready.notify()
                return

    def notify_all(self) -> None:
        """Wakes every worker."""
        for device in self.each:
            device.ready.notify_all()
        self.back_or_done.notify_all()

    def idle_waits(self) -> bool:
        """Whether a worker waits of one that could start at once."""
        return any(device.idle and device.waiting for device in self.each)

    def attended(self) -> bool:
        """Whether a worker waits that is free to look after the queue: it wakes before a deadline is missed.

        One whose device's last batch is yet to be answered may wait for just that.
        """
        # What is in flight is unanswered, too: these are idle. The first, since mostly there is one.
        first = self.each[0]
        if first.waiting and not first.unanswered:
            return True
        return len(self.each) > 1 and any(device.waiting and not device.unanswered for device in self.each)
