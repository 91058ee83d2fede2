"""Watchdog: ends runs that exceed their limit, and reports those that do not end when asked to."""

from __future__ import annotations

import enum
import logging
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from tensorferry.batcher.supervision import RestartBackoff, supervise

_log = logging.getLogger("tensorferry.server")

# A run counts as hung if it has not ended this long after it was asked to.
GRACE_SECONDS = 1.0


class RunOutcome(enum.Enum):
    """State of a run with respect to its limit."""

    IN_TIME = "in time"
    ENDED = "asked to end"
    HUNG = "hung"


# A module global, because attribute lookup on the enum is measurable for each run.
_IN_TIME = RunOutcome.IN_TIME


class WatchedRun:
    """Current run of one instance, and its limit. Thread-safe.

    `end` asks the run to end, `allow_next` permits the next one; both only set a flag. `hung` is called on the
    watchdog's thread if the run did not end.
    """

    def __init__(self, hung: Callable[[], None]) -> None:
        # Guards every field below. Only `end` and `allow_next` are called while it is held: without the lock, `end`
        # could come after the run has ended by itself, and end the next one.
        self._lock = threading.Lock()
        self._hung = hung
        self._due: float | None = None
        self._outcome = RunOutcome.IN_TIME
        self._end: Callable[[], None] | None = None
        self._allow_next: Callable[[], None] | None = None

    def begin(
        self,
        limit: float,
        end: Callable[[], None] | None = None,
        allow_next: Callable[[], None] | None = None,
    ) -> float:
        """Start a run that may take `limit` seconds. Return the current time of `time.monotonic`."""
        now = time.monotonic()
        with self._lock:
            self._due = now + limit
            self._outcome = _IN_TIME
            self._end, self._allow_next = end, allow_next
        return now

    def finish(self) -> RunOutcome:
        """Finish the run, and return its outcome."""
        with self._lock:
            self._due = self._end = None
            allow_next, self._allow_next = self._allow_next, None
            outcome = self._outcome
            if allow_next is not None and outcome is not _IN_TIME:
                allow_next()
            return outcome

    @property
    def hangs(self) -> bool:
        """Whether the run was asked to end and has not."""
        with self._lock:
            return self._due is not None and self._outcome is RunOutcome.HUNG

    def check(self, now: float) -> float | None:
        """End the run, or report it as hung, if its time is over. Return the time of the next check, if any."""
        with self._lock:
            if self._due is None or self._outcome is RunOutcome.HUNG:
                return None
            if now < self._due:
                return self._due
            if self._outcome is RunOutcome.IN_TIME and self._end is not None:
                self._outcome = RunOutcome.ENDED
                self._end()
                self._due = now + GRACE_SECONDS
                return self._due
            self._outcome = RunOutcome.HUNG
        self._hung()
        return None


class Watchdog:
    """Thread that checks all watched runs. Thread-safe; `close` ends it.

    `shortest_limit` is the shortest limit of any run, in seconds. Checks are at most that far apart, so the thread
    need not be woken when a run begins.
    """

    def __init__(self, shortest_limit: float) -> None:
        self._shortest_limit = shortest_limit
        # Guards _watched and _closed. Nothing is called while it is held.
        self._lock = threading.Lock()
        self._closing = threading.Condition(self._lock)
        # Weak references, because instances are dropped with their models.
        self._watched: weakref.WeakSet[WatchedRun] = weakref.WeakSet()
        self._closed = False
        self._backoff = RestartBackoff()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def watch(self, watched: WatchedRun) -> None:
        """Check this run too from now on."""
        with self._lock:
            self._watched.add(watched)

    def close(self) -> None:
        """End the thread. Idempotent."""
        with self._lock:
            self._closed = True
            self._closing.notify()
        self._backoff.end()
        self._thread.join()

    def _run(self) -> None:
        supervise(
            self._check_until_closed,
            lambda fault: _log.error("the watchdog crashed (bug); restarting", exc_info=fault),
            self._backoff,
        )

    def _check_until_closed(self) -> None:
        while True:
            now = time.monotonic()
            with self._lock:
                everything = list(self._watched)
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
                if self._closed:
                    return
                self._closing.wait(max(0.0, due - time.monotonic()))
                if self._closed:
                    return


@dataclass(frozen=True, slots=True)
class RunLimits:
    """Limits of an instance, and the watchdog that enforces them.

    A run may take `run_seconds` (0: no limit). `load_seconds` is how long the first load took.
    """

    watchdog: Watchdog | None = None
    run_seconds: float = 0.0
    load_seconds: float = 0.0
