"""Temporary directories that are removed even if the process is killed."""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path
from shutil import rmtree

from tensorferry.server.errors import StartError

_log = logging.getLogger("tensorferry.server")

_PREFIX = "tensorferry-"
# The process that uses a directory holds an exclusive lock on this file in it. The kernel releases the lock when the
# process ends.
_LOCK = ".lock"


class ScratchDirectory:
    """New directory in TMPDIR, removed with the last reference to this object or at the end of the process.

    If this process is killed, `remove_abandoned` of a later process removes it. OSError if it cannot be created.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._finalizer = weakref.finalize(self, rmtree, self.path, ignore_errors=True)
        unlocked = self.path / f"{_LOCK}.new"
        lock = unlocked.open("wb")
        weakref.finalize(self, lock.close)
        fcntl.flock(lock, fcntl.LOCK_EX)
        # The file gets this name after it is locked, so that no other process can mistake the directory for abandoned.
        unlocked.rename(self.path / _LOCK)

    def remove(self) -> None:
        """Remove the directory now. Idempotent."""
        self._finalizer()


def remove_abandoned() -> None:
    """Remove directories in TMPDIR that killed processes of this user have left. StartError if nothing can be written there."""
    try:
        folder = Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        raise StartError(f"{error.strerror}: mount a volume at /tmp, or set TMPDIR") from None
    for lock in folder.glob(f"{_PREFIX}*/{_LOCK}"):
        with suppress(OSError):
            if lock.parent.lstat().st_uid == os.geteuid() and not lock.parent.is_symlink() and _is_free(lock):
                rmtree(lock.parent)
                _log.info("removed %s, which a killed process had left behind", lock.parent)


def _is_free(path: Path) -> bool:
    """Whether no process holds the lock."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
