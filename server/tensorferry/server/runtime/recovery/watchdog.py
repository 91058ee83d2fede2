"""Watchdog: ends runs that exceed their limit, and reports those that do not end when asked to."""

from __future__ import annotations

import enum
import logging
import math
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tensorferry.batcher import RunTimedOut
from tensorferry.batcher.supervision import RestartBackoff
from tensorferry.server.runtime.recovery.instance_health import InstanceHealth
from tensorferry.server.system.threads import ThreadKind, new_thread

_log = logging.getLogger("tensorferry.server")

# A run counts as hung if it has not ended this long after it was asked to.
GRACE_SECONDS = 1.0
# The least limit of a rebuild, and its limit in times of the first load.
REBUILD_SECONDS = 60.0
_REBUILD_FACTOR = 10.0


class Overdue(enum.Enum):
    """State of a run that exceeds its limit."""

    ENDED = "asked to end"
    HUNG = "hung"


class Interruptible(Protocol):
    """What runs, and can be asked to end: a session, or a child process. Thread-safe."""

    def end_runs(self) -> None:
        """End the current run, which then raises an exception, and those that begin before `allow_runs`."""

    def allow_runs(self) -> None:
        """Permit runs again."""


class WatchedRun(ABC):
    """Current run of the instance `index` of a model, and its limit; a base class. One thread at a time runs, the watchdog checks.

    A run costs no lock. The running thread sets `_running` and `_overdue` and then `_due` when a run begins, and `_due`
    to None when it ends. After that it looks at `_overdue`, and calls `finish` if that is set. The watchdog sets
    `_overdue` before it looks at `_due` once more: so at least one of them sees that the run is over.
    """

    def __init__(self, health: InstanceHealth, index: int, limits: RunLimits) -> None:
        self._health = health
        self._index = index
        self._limit = limits.run_seconds or math.inf
        self._rebuild_limit = limits.rebuild_seconds
        self._give_up: Callable[[RunTimedOut], None] = lambda error: None
        # Held while an overdue run is asked to end or permitted to go on: otherwise a late `end_runs` could end the
        # next run. Guards `_hung_at`, and `_overdue` of a run that is overdue.
        self._lock = threading.Lock()
        # When the run exceeds its limit; None between runs.
        self._due: float | None = None
        # None while the run is in time.
        self._overdue: Overdue | None = None
        # What can be asked to end its runs; None if the run cannot be ended.
        self._running: Interruptible | None = None
        # When a run that was asked to end counts as hung.
        self._hung_at = 0.0
        # When the run began, for the log.
        self._began = 0.0
        if limits.watchdog is not None:
            limits.watchdog.watch(self)

    def on_hang(self, give_up: Callable[[RunTimedOut], None]) -> None:
        """Set the function to call if a run or a rebuild does not end even after it was asked to."""
        self._give_up = give_up

    def finish(self) -> Overdue | None:
        """Finish a run, permit the next one, and return whether this one was overdue."""
        self._due = None
        with self._lock:
            if self._overdue is not None and self._running is not None:
                self._running.allow_runs()
            return self._overdue

    @property
    def hangs(self) -> bool:
        """Whether the run was asked to end and has not."""
        with self._lock:
            return self._due is not None and self._overdue is Overdue.HUNG

    def check(self, now: float) -> float | None:
        """End the run, or report it as hung, if its time is over. Return the time of the next check, if any."""
        with self._lock:
            due, before, running = self._due, self._overdue, self._running
            if due is None or before is Overdue.HUNG:
                return None
            limit = due if before is None else self._hung_at
            if now < limit:
                return limit
            ends = before is None and running is not None
            self._overdue = Overdue.ENDED if ends else Overdue.HUNG
            if self._due is not due:
                # The run ended meanwhile. Another one may have begun.
                self._overdue = before
                return None
            if ends and running is not None:
                running.end_runs()
                self._hung_at = now + GRACE_SECONDS
                return self._hung_at
        self._give_up_run()
        return None

    @abstractmethod
    def _give_up_run(self) -> None:
        """Give up a run that did not end when asked to. Called on the watchdog's thread."""


class Watched(Protocol):
    """What a watchdog checks."""

    def check(self, now: float) -> float | None:
        """Act if something is due; return when to check again, None for the usual time. Does not block."""


class Watchdog:
    """Thread that checks all watched runs, and what else is due at times. Thread-safe; `close` ends it.

    `shortest_limit` is the shortest limit of any run, in seconds. Checks are at most that far apart, so the thread
    need not be woken when a run begins.
    """

    def __init__(self, shortest_limit: float) -> None:
        self._shortest_limit = shortest_limit
        # Guards the fields below. Nothing is called while it is held.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        # Weak references, because instances are dropped with their models.
        self._watched: weakref.WeakSet[Watched] = weakref.WeakSet()
        # Whether something is watched that was not checked yet.
        self._added = False
        self._closed = False
        self._backoff = RestartBackoff()
        self._thread = new_thread("watchdog", self._run, ThreadKind.RESTARTED, backoff=self._backoff)
        self._thread.start()

    def watch(self, watched: Watched) -> None:
        """Check this too from now on, as long as it is referred to elsewhere."""
        with self._lock:
            self._watched.add(watched)
            self._added = True
            self._changed.notify()

    def close(self) -> None:
        """End the thread. Idempotent."""
        with self._lock:
            self._closed = True
            self._changed.notify()
        self._backoff.end()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed:
            now = time.monotonic()
            with self._lock:
                everything = list(self._watched)
                self._added = False
            due = now + self._shortest_limit
            for watched in everything:
                try:
                    next_check = watched.check(now)
                except BaseException:
                    _log.exception("the watchdog failed; this is a bug in tensorferry.server")
                    continue
                if next_check is not None:
                    due = min(due, next_check)
            # The waiting thread must not keep models alive.
            watched = None  # type: ignore[assignment]
            everything.clear()
            with self._lock:
                if not self._added and not self._closed:
                    self._changed.wait(max(0.0, due - time.monotonic()))


@dataclass(frozen=True, slots=True)
class RunLimits:
    """Limits of an instance, and the watchdog that enforces them.

    A run may take `run_seconds` (0: no limit). `load_seconds` is how long the first load took.
    """

    watchdog: Watchdog | None = None
    run_seconds: float = 0.0
    load_seconds: float = 0.0

    @property
    def rebuild_seconds(self) -> float:
        """How long another load may take: about as long as the first one, so a much longer one counts as hung."""
        return max(REBUILD_SECONDS, _REBUILD_FACTOR * self.load_seconds)
