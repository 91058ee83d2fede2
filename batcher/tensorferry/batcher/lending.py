"""Lending: when a thread that brings requests may run their batch itself, in the stead of the device's worker."""

from __future__ import annotations

import math

from tensorferry.batcher.backlog import Backlog
from tensorferry.batcher.device import Device

# Some models' time depends on their inputs' values. After a batch that kept the device for this long,
# in seconds, none is expected to be short for a while, whatever is usual.
_LONG_SECONDS = 0.02
_UNSTEADY_SECONDS = 60.0


class Lending:
    """Guarded by the queue's lock.

    `possible` says that there is one device, which runs one batch at a time, that no batch waits for a
    window's end, and that a batch's time depends on its shape alone.
    """

    __slots__ = ("_backlog", "_device", "_possible", "_unsteady_until")

    def __init__(self, backlog: Backlog, device: Device, *, possible: bool) -> None:
        self._backlog = backlog
        self._device = device
        self._possible = possible
        # A batch took much longer than any short one: until then workers run them all.
        self._unsteady_until = -math.inf

    def allows(self, most_seconds: float, now: float) -> bool:
        """Whether the worker waits for a batch, and any batch that may leave is known to keep the device for at most so long."""
        device = self._device
        if not (self._possible and device.idle and device.waiting and now >= self._unsteady_until):
            return False
        if device.outage is not None:
            return False
        return self._backlog.slowest_batch() <= most_seconds

    def never_again(self) -> None:
        """A run did not end by itself: whoever brought its requests, and serves others too, must not wait for such a one."""
        self._possible = False

    def ran(self, seconds: float, now: float) -> None:
        """A batch kept the device for so many seconds."""
        if seconds > _LONG_SECONDS:
            self._unsteady_until = now + _UNSTEADY_SECONDS
