"""Files that may change while the server runs."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

# Two writes within a tick of the file system's clock leave the same times: what is younger is read again.
_SETTLED_SECONDS = 0.1

_Fingerprint = tuple[int, int, int, int, int] | None


class FileWatch:
    """Tells whether files have changed, whatever way: written to, replaced, or behind a link that was. Its owner's lock guards it."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = tuple(paths)
        self._seen: tuple[_Fingerprint, ...] | None = None

    def changed(self) -> bool:
        """Whether they must be read, the first time or again. What is read now is what was there then, or newer."""
        marks = tuple(map(_fingerprint, self._paths))
        if marks == self._seen:
            return False
        now = time.time_ns()
        settled = all(mark is None or not 0 <= now - mark[3] < _SETTLED_SECONDS * 1e9 for mark in marks)
        self._seen = marks if settled else None
        return True

    def forget(self) -> None:
        """They could not be used, which may be no fault of theirs: the next time they have changed."""
        self._seen = None


def _fingerprint(path: Path) -> _Fingerprint:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size
