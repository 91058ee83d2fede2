"""Detection of changed files."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

# Two writes within one tick of the file system's clock leave the same times, so a younger file is read again.
_SETTLED_SECONDS = 0.1

_Fingerprint = tuple[int, int, int, int, int] | None


class FileWatch:
    """Watch for changed, replaced or relinked files. Not thread-safe."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = tuple(paths)
        self._seen: tuple[_Fingerprint, ...] | None = None

    def changed(self) -> bool:
        """Return whether the files must be read, for the first time or again."""
        fingerprints = tuple(map(_fingerprint, self._paths))
        if fingerprints == self._seen:
            return False
        now = time.time_ns()
        settled = all(
            fingerprint is None or not 0 <= now - fingerprint[3] < _SETTLED_SECONDS * 1e9
            for fingerprint in fingerprints
        )
        self._seen = fingerprints if settled else None
        return True

    def forget(self) -> None:
        """Make the next `changed` return True, because the files could not be used, perhaps temporarily."""
        self._seen = None


def _fingerprint(path: Path) -> _Fingerprint:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size
