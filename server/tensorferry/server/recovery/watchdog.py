"""The watchdog: ends runs that take too long, and says so when one does not even end then."""

from __future__ import annotations

import enum
import logging
import threading
import time
import weakref
from collections.abc import Callable

from tensorferry.batcher.supervision import last

# After so many seconds the watchdog goes on, should it have failed itself.
_AGAIN_SECONDS = 0.1

_log = logging.getLogger("tensorferry.server")

# How long a run that was told to end may take to do so before it counts as hung.
GRACE_SECONDS = 1.0


class RunOutcome(enum.Enum):
    """What the watchdog has made of what ran."""

    IN_TIME = "in time"
    ENDED = "told to end"
    HUNG = "hung"


# For what is done for each run: to look a member up costs more.
_IN_TIME = RunOutcome.IN_TIME


class WatchedRun:
    """Something that runs, one at a time, and what may be done about it. Thread-safe.

    `end` tells what runs to end, and `allow_next` that the next may run; both only set a flag. `hung` is called, on the
    watchdog's thread, when it did not end.
    """

    def __init__(self, hung: Callable[[], None]) -> None:
        # Guards every field below. Nothing is called while it is held but `end` and `allow_next`: of a run that ends in
        # time, and the watchdog's wish to end it, one is first, and the next run must not suffer for it.
        self._lock = threading.Lock()
        self._hung = hung
        self._due: float | None = None
        self._verdict = RunOutcome.IN_TIME
        self._end: Callable[[], None] | None = None
        self._unend: Callable[[], None] | None = None

    def begin(
        self,
        limit: float,
        end: Callable[[], None] | None = None,
        allow_next: Callable[[], None] | None = None,
    ) -> float:
        """It starts, and may take so many seconds. Returns when that was, on the clock of `time.monotonic`."""
        now = time.monotonic()
        with self._lock:
            self._due = now + limit
            self._verdict = _IN_TIME
            self._end, self._unend = end, allow_next
        return now

    def finish(self) -> RunOutcome:
        """It has ended."""
        with self._lock:
            self._due = self._end = None
            allow_next, self._unend = self._unend, None
            verdict = self._verdict
            if allow_next is not None and verdict is not _IN_TIME:
                allow_next()
            return verdict

    @property
    def hangs(self) -> bool:
        """Whether it was told to end and has not."""
        with self._lock:
            return self._due is not None and self._verdict is RunOutcome.HUNG

    def check(self, now: float) -> float | None:
        """Does what is due; when to look again, None when nothing runs."""
        with self._lock:
            if self._due is None or self._verdict is RunOutcome.HUNG:
                return None
            if now < self._due:
                return self._due
            if self._verdict is RunOutcome.IN_TIME and self._end is not None:
                self._verdict = RunOutcome.ENDED
                self._end()
                self._due = now + GRACE_SECONDS
                return self._due
            self._verdict = RunOutcome.HUNG
        self._hung()
        return None


class Watchdog:
    """One thread that looks after everything that is watched. Thread-safe; `close` ends it.

    Whatever starts after a look has at least `least` seconds, and needs no look before: so nothing tells it of a start.
    """

    def __init__(self, least: float) -> None:
        self._least = least
        # Guards _watched and _closed. Nothing is called while it is held.
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        # Weakly: instances come and go with their models.
        self._watched: weakref.WeakSet[WatchedRun] = weakref.WeakSet()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def watch(self, watched: WatchedRun) -> None:
        """Looks after this, too, from now on."""
        with self._lock:
            self._watched.add(watched)

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        with self._lock:
            self._closed = True
            self._ended.notify()
        self._thread.join()

    def _run(self) -> None:
        last(self._look_until_closed, self._begin_again)

    def _begin_again(self, fault: BaseException) -> None:
        _log.error("the watchdog ended unexpectedly; it is begun again", exc_info=fault)
        with self._lock:
            if not self._closed:
                self._ended.wait(_AGAIN_SECONDS)

    def _look_until_closed(self) -> None:
        while True:
            now = time.monotonic()
            with self._lock:
                everything = list(self._watched)
            due = now + self._least
            for watched in everything:
                try:
                    again = watched.check(now)
                except BaseException:
                    _log.exception("the watchdog failed; this is a bug in tensorferry.server")
                    continue
                if again is not None:
                    due = min(due, again)
            # An idle thread must not keep models that are gone.
            watched = None  # type: ignore[assignment]
            everything.clear()
            with self._lock:
                if self._closed:
                    return
                self._ended.wait(max(0.0, due - time.monotonic()))
                if self._closed:
                    return
