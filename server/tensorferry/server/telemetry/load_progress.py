"""Log lines about a model that takes long to load: what is being done, and for how long."""

from __future__ import annotations

import logging
import threading
from contextvars import ContextVar
from types import TracebackType
from typing import Self

from tensorferry.batcher.clock import Clock, MonotonicClock

_log = logging.getLogger("tensorferry.server")

_FIRST_SECONDS, _LONGEST_SECONDS = 2.0, 30.0

# Of the load that this thread is in.
_current: ContextVar[LoadProgress | None] = ContextVar("load progress", default=None)


def set_load_stage(stage: str) -> None:
    """What the current load does from now on; without effect outside of one."""
    progress = _current.get()
    if progress is not None:
        progress.stage = stage


class LoadProgress:
    """Context of a load that logs a line after 2 s, then after twice as long each time, up to 30 s."""

    def __init__(self, what: str, clock: Clock | None = None) -> None:
        self.stage = "reading the file"
        self._what = what
        self._clock = clock or MonotonicClock()
        self._began = self._clock.now()
        # Guards _over, and is notified when it is set. Nothing is logged while it is held.
        self._ended = threading.Condition()
        self._over = False
        self._thread = threading.Thread(target=self._report, name="load-progress", daemon=True)

    def __enter__(self) -> Self:
        self._token = _current.set(self)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _current.reset(self._token)
        with self._ended:
            self._over = True
            self._ended.notify_all()
        self._thread.join()

    def _report(self) -> None:
        pause = _FIRST_SECONDS
        due = self._began + pause
        while self._wait_until(due):
            _log.info("%s has been loading for %.0f s: %s", self._what, due - self._began, self.stage)
            pause = min(2 * pause, _LONGEST_SECONDS)
            due += pause

    def _wait_until(self, due: float) -> bool:
        """Whether the load still goes on at that time."""
        with self._ended:
            while not self._over and self._clock.now() < due:
                self._clock.wait(self._ended, due)
            return not self._over
