"""Progress lines in the log while a model takes long to load."""

from __future__ import annotations

import logging
import threading
from contextvars import ContextVar
from types import TracebackType
from typing import Self

from tensorferry.batcher.clock import Clock, MonotonicClock
from tensorferry.server.system.threads import ThreadKind, new_thread

_log = logging.getLogger("tensorferry.server")

_FIRST_SECONDS, _LONGEST_SECONDS = 2.0, 30.0

# Progress of the load that runs in this context.
_current: ContextVar[LoadProgress | None] = ContextVar("load progress", default=None)


def set_load_stage(stage: str) -> None:
    """Set the stage of the current load. No effect outside of a load."""
    progress = _current.get()
    if progress is not None:
        progress.stage = stage


class LoadProgress:
    """Context of a load. It logs a line after 2 s, then at intervals that double up to 30 s."""

    def __init__(self, what: str, clock: Clock | None = None) -> None:
        self.stage = "reading the file"
        self._what = what
        self._clock = clock or MonotonicClock()
        self._began = self._clock.now()
        # Guards _ended, and is notified when it is set. Nothing is logged while it is held.
        self._end = threading.Condition()
        self._ended = False
        self._thread = new_thread("load-progress", self._report, ThreadKind.EXPENDABLE)

    def __enter__(self) -> Self:
        self._token = _current.set(self)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _current.reset(self._token)
        with self._end:
            self._ended = True
            self._end.notify_all()
        self._thread.join()

    def _report(self) -> None:
        interval = _FIRST_SECONDS
        due = self._began + interval
        while self._wait_until(due):
            _log.info("%s has been loading for %.0f s: %s", self._what, due - self._began, self.stage)
            interval = min(2 * interval, _LONGEST_SECONDS)
            due += interval

    def _wait_until(self, due: float) -> bool:
        """Wait until the time `due`. Return False if the load has ended."""
        with self._end:
            while not self._ended and self._clock.now() < due:
                self._clock.wait(self._end, due)
            return not self._ended
