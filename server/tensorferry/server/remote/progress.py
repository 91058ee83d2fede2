"""Progress lines in the log while a file is downloaded."""

from __future__ import annotations

import logging
from collections.abc import Callable

_log = logging.getLogger("tensorferry.server")

# Shortest time between two lines.
_INTERVAL_SECONDS = 5.0


def size_text(count: float) -> str:
    """Return a number of bytes with a unit."""
    for unit in ("bytes", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


class DownloadProgress:
    """Writes at most one line in 5 seconds. `now` returns monotonic seconds."""

    def __init__(self, what: str, done: int, size: int | None, now: Callable[[], float]) -> None:
        self._what = what
        self._size = size
        self._now = now
        self._began = self._written = now()
        self._done_before = done

    def update(self, done: int) -> None:
        """Note that `done` bytes of the file are there."""
        now = self._now()
        if now - self._written < _INTERVAL_SECONDS:
            return
        self._written = now
        share = f" of {size_text(self._size)} ({100 * done / self._size:.0f} %)" if self._size else ""
        rate = (done - self._done_before) / (now - self._began)
        _log.info("%s: %s%s downloaded, %s/s", self._what, size_text(done), share, size_text(rate))
