"""Health of a loaded model: which instances work, and counts of their failures."""

from __future__ import annotations

import enum
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate


class InstanceEvent(enum.Enum):
    """Event of an instance. The values are label values of its metric."""

    # A worker thread ended unexpectedly and was replaced.
    WORKER_DIED = "worker_died"
    # The child process of a function ended by itself and is replaced.
    PROCESS_DIED = "process_died"
    # The device or the session failed. The session will be rebuilt.
    DEVICE_FAILED = "device_failed"
    # The watchdog ended a run that took too long.
    RUN_ENDED = "run_ended"
    # A run or a rebuild did not end when asked to, and was given up.
    HUNG = "hung"
    # Of a session, or the start of another process.
    REBUILD_FAILED = "rebuild_failed"
    REBUILT = "rebuilt"


@dataclass(frozen=True, slots=True)
class InstanceHealthStatistics:
    """Number of instances, number of those that are down, and counts of their events."""

    instances: int
    down: int
    events: Mapping[InstanceEvent, int]


class InstanceHealth:
    """Record of a model's instances that are down, and why. Thread-safe.

    `changed` is called outside the lock whenever `reason` may have changed; it must read `reason` again. `lost` is
    called once, with this object and the reason, when every instance of a stage is unrecoverable.

    `stages` has the number of instances of each stage. Instances are counted from 0 through all stages. The model works as
    long as one instance of each stage does.
    """

    def __init__(
        self,
        name: str = "",
        version: str = "",
        stages: Sequence[int] = (1,),
        changed: Callable[[InstanceHealth], None] = lambda health: None,
        lost: Callable[[InstanceHealth, str], None] = lambda health, reason: None,
    ) -> None:
        self.name = name
        self.version = version
        # The number of each stage's first instance, and after its last one.
        self._stages = tuple(zip(accumulate(stages, initial=0), accumulate(stages), strict=False))
        self._instances = sum(stages)
        self._changed = changed
        self._lost = lost
        # Guards _down, _unrecoverable and _events. Nothing is called while it is held.
        self._lock = threading.Lock()
        self._down: dict[int, str] = {}
        self._unrecoverable: set[int] = set()
        self._events: Counter[InstanceEvent] = Counter()

    @property
    def reason(self) -> str | None:
        """Reason why no instance of a stage works; None while one of each does."""
        with self._lock:
            for first, end in self._stages:
                down = [reason for instance, reason in self._down.items() if first <= instance < end]
                if len(down) == end - first:
                    return down[-1]
            return None

    def statistics(self) -> InstanceHealthStatistics:
        """Return the current counts."""
        with self._lock:
            return InstanceHealthStatistics(self._instances, len(self._down), dict(self._events))

    def record(self, event: InstanceEvent) -> None:
        """Count an event. Call this before notifying listeners, so that they see the updated count."""
        with self._lock:
            self._events[event] += 1

    def mark_down(self, instance: int, reason: str, *, unrecoverable: bool = False) -> None:
        """Mark an instance as not working; `unrecoverable` means until the process is restarted."""
        with self._lock:
            self._down.pop(instance, None)
            self._down[instance] = reason
            was_lost = self._lost_locked()
            if unrecoverable:
                self._unrecoverable.add(instance)
            lost = self._lost_locked() and not was_lost
        self._changed(self)
        if lost:
            self._lost(self, reason)

    def _lost_locked(self) -> bool:
        """Whether every instance of a stage is unrecoverable."""
        return any(self._unrecoverable.issuperset(range(first, end)) for first, end in self._stages)

    def mark_up(self, instance: int) -> None:
        """Mark an instance as working again."""
        with self._lock:
            self._down.pop(instance, None)
            self._unrecoverable.discard(instance)
        self._changed(self)
