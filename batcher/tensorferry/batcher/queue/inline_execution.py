"""Lending: when a thread that brings requests may run their batch itself, instead of the device's worker."""

from __future__ import annotations

import math

from tensorferry.batcher.queue.devices import Device

# Some models' time depends on their inputs' values. A batch that took longer than this, in seconds, is followed by
# a time in which workers run every batch, however short the batches usually are. It is a hundred times what a
# short batch takes, because a busy machine suspends any thread for a few milliseconds.
_LONG_SECONDS = 0.02
# That time, in seconds: at first, because the process may only have been suspended. It doubles with each long batch
# that follows within the last value, and that value is also the most.
_FIRST_UNSTEADY_SECONDS = 1.0
_LAST_UNSTEADY_SECONDS = 60.0


class InlineExecution:
    """Guarded by the queue's lock.

    `possible` says that there is one device, which runs one batch at a time, that no batch waits for a
    window's end, and that a batch's time depends on its shape alone.
    """

    __slots__ = ("_device", "_possible", "_unsteady_seconds", "_unsteady_until")

    def __init__(self, device: Device, *, possible: bool) -> None:
        self._device = device
        self._possible = possible
        # A batch took much longer than any short one: until then workers run them all.
        self._unsteady_until = -math.inf
        # How long that is, the last time that it was so.
        self._unsteady_seconds = 0.0

    def possible_now(self, now: float) -> bool:
        """Whether the worker waits for a batch, and another thread may run one in its stead that is known to be short."""
        device = self._device
        return (
            self._possible
            and device.waiting > 0
            and now >= self._unsteady_until
            and device.outage is None
            and device.idle
        )

    def never_again(self) -> None:
        """A run did not end by itself: whoever brought its requests, and serves others too, must not wait for such a one."""
        self._possible = False

    @staticmethod
    def is_long(seconds: float) -> bool:
        """Whether a batch that took so many seconds is none that another thread should have run."""
        return seconds > _LONG_SECONDS

    def ran(self, seconds: float, now: float) -> None:
        """A batch took so many seconds, whether it succeeded or failed."""
        if self.is_long(seconds):
            again = now < self._unsteady_until + _LAST_UNSTEADY_SECONDS
            longer = min(2 * self._unsteady_seconds, _LAST_UNSTEADY_SECONDS)
            self._unsteady_seconds = longer if again else _FIRST_UNSTEADY_SECONDS
            self._unsteady_until = now + self._unsteady_seconds
