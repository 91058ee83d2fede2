"""Temporary directories that do not outlive the process for long, however it ends."""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path
from shutil import rmtree

_log = logging.getLogger("tensorferry.server")

_PREFIX = "tensorferry-"
# The process that uses a directory holds an exclusive lock on this file in it. The kernel lets the lock go when the
# process ends.
_LOCK = ".lock"


class ScratchDirectory:
    """A new directory in TMPDIR, removed with the last reference to this object, or at the end of the process.

    `remove_abandoned` of a later process removes it where this process was killed. OSError where it cannot be made.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._finalizer = weakref.finalize(self, rmtree, self.path, ignore_errors=True)
        unlocked = self.path / f"{_LOCK}.new"
        lock = unlocked.open("wb")
        weakref.finalize(self, lock.close)
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Under this name it is locked from the start, so that no other process can take the directory for abandoned.
        unlocked.rename(self.path / _LOCK)

    def remove(self) -> None:
        """Remove the directory now. Idempotent."""
        self._finalizer()


def remove_abandoned() -> None:
    """Remove the directories in TMPDIR that killed processes of this user left behind."""
    for lock in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
        with suppress(OSError):
            if lock.parent.lstat().st_uid == os.geteuid() and not lock.parent.is_symlink() and _is_free(lock):
                rmtree(lock.parent)
                _log.info("removed %s, which a process that was killed had left behind", lock.parent)


def _is_free(path: Path) -> bool:
    """Whether no process holds the lock."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
