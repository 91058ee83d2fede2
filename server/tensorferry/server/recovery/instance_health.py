"""The health of a loaded model: which of its instances work, and what has befallen them."""

from __future__ import annotations

import enum
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass


class InstanceEvent(enum.Enum):
    """What befalls an instance; the values are those of the label of its metric."""

    # Its worker ended unexpectedly, and another takes its place.
    WORKER_DIED = "worker_died"
    # Its device, or its session, failed, and is to be built anew.
    DEVICE_FAILED = "device_failed"
    # The watchdog ended a run that took too long.
    RUN_ENDED = "run_ended"
    # What the watchdog told to end, or a session that is being built, did not, and was given up.
    HUNG = "hung"
    REBUILD_FAILED = "rebuild_failed"
    REBUILT = "rebuilt"


@dataclass(frozen=True, slots=True)
class InstanceHealthStatistics:
    """How many instances a model has, how many of them are out, and how often what befell them."""

    instances: int
    out: int
    events: Mapping[InstanceEvent, int]


class InstanceHealth:
    """Which of a model's instances are out, and why. Thread-safe.

    `changed` is called, outside the lock, whenever `reason` may have changed; what is true then is to be asked again.
    `lost` is called, once, with the reason when none is left and none is expected back.
    """

    def __init__(
        self,
        name: str = "",
        version: str = "",
        instances: int = 1,
        changed: Callable[[InstanceHealth], None] = lambda health: None,
        lost: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self.name = name
        self.version = version
        self._instances = instances
        self._changed = changed
        self._lost = lost
        # Guards _out, _unrecoverable and _events. Nothing is called while it is held.
        self._lock = threading.Lock()
        self._out: dict[int, str] = {}
        self._unrecoverable: set[int] = set()
        self._events: Counter[InstanceEvent] = Counter()

    @property
    def reason(self) -> str | None:
        """Why no instance works; None while one does."""
        with self._lock:
            if len(self._out) < self._instances:
                return None
            return next(reversed(self._out.values()))

    def statistics(self) -> InstanceHealthStatistics:
        """Of this moment."""
        with self._lock:
            return InstanceHealthStatistics(self._instances, len(self._out), dict(self._events))

    def record(self, event: InstanceEvent) -> None:
        """Counts it. Before what comes of it is told: who hears of that finds it counted."""
        with self._lock:
            self._events[event] += 1

    def mark_down(self, instance: int, reason: str, *, unrecoverable: bool = False) -> None:
        """An instance does not work; if `unrecoverable`, nothing that the process can do brings it back."""
        with self._lock:
            self._out.pop(instance, None)
            self._out[instance] = reason
            before = len(self._unrecoverable)
            if unrecoverable:
                self._unrecoverable.add(instance)
            lost = before < len(self._unrecoverable) == self._instances
        self._changed(self)
        if lost:
            self._lost(reason)

    def mark_up(self, instance: int) -> None:
        """An instance works again."""
        with self._lock:
            self._out.pop(instance, None)
            self._unrecoverable.discard(instance)
        self._changed(self)
