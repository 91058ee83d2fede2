"""A clock and a model function controlled by the test. Public, for tests of code that uses the batcher."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np


class VirtualClock:
    """A clock that does not move until `advance` is called. Thread-safe.

    Threads that wait on it wake when they are notified, or when `advance` passes their time.
    """

    def __init__(self, start: float = 0.0) -> None:
        # Guards _now and _sleepers. No condition of a sleeper is touched while it is held.
        self._lock = threading.Lock()
        self._sleeper_added = threading.Condition(self._lock)
        self._now = start
        self._sleepers: list[tuple[float, threading.Condition]] = []

    def now(self) -> float:
        """Return the current time in seconds."""
        with self._lock:
            return self._now

    def wait(self, condition: threading.Condition, until: float) -> None:
        """Wait for a notification, or until `advance` reaches `until`."""
        sleeper = (until, condition)
        with self._lock:
            if self._now >= until:
                return
            self._sleepers.append(sleeper)
            self._sleeper_added.notify_all()
        try:
            condition.wait()
        finally:
            with self._lock:
                self._sleepers.remove(sleeper)

    def advance(self, seconds: float) -> None:
        """Move the time on, and wake the threads whose time has come."""
        with self._lock:
            self._now += seconds
            due = [condition for until, condition in self._sleepers if until <= self._now]
        for condition in due:
            with condition:
                condition.notify_all()

    def await_sleepers(self, count: int = 1, *, until: float | None = None) -> None:
        """Block until `count` threads wait; with `until`, count only those that wait until exactly that time."""
        with self._lock:
            while sum(1 for due, _ in self._sleepers if until is None or due == until) < count:
                if not self._sleeper_added.wait(30):
                    raise TimeoutError(f"{count} sleepers did not come; waiting are {self._sleepers}")


class ScriptedRunner:
    """A model function whose batches the test controls. Thread-safe.

    It records its batches in `batches`, and returns the result of `fn` (twice the input if not given). With `gated`, each
    call waits for a `release`.
    """

    def __init__(self, fn: Callable[[Any], Any] | None = None, *, gated: bool = False) -> None:
        self._fn = fn or (lambda x: x * 2)
        # Guards batches and _permits, and is notified when either grows.
        self._changed = threading.Condition()
        self._permits: float = 0 if gated else math.inf
        self.batches: list[Any] = []

    def __call__(self, batch: Any) -> Any:
        """Record the batch, wait for its release if gated, and return the result of `fn`."""
        with self._changed:
            self.batches.append(batch if isinstance(batch, dict) else np.array(batch))
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._permits > 0)
            self._permits -= 1
        return self._fn(batch)

    def release(self, batches: int = 1) -> None:
        """Let this many batches end, now or when they come."""
        with self._changed:
            self._permits += batches
            self._changed.notify_all()

    def open(self) -> None:
        """Let all batches end, from now on."""
        with self._changed:
            self._permits = math.inf
            self._changed.notify_all()

    def await_batches(self, count: int) -> None:
        """Block until `count` batches have started since the beginning."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.batches) >= count, 30):
                raise TimeoutError(f"{count} batches did not start; there were {len(self.batches)}")
