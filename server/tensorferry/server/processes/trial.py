"""The trial of a suspect: one at a time of all processes, and only while all of them serve.

So a request that ends processes ends only one at a time, and the others serve meanwhile.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_FILE = "trial"


class Trial:
    """The right to run a suspect, which the processes share by a file. Thread-safe.

    It is locked during a trial, and not empty. The kernel ends the lock of a process that dies, but the content stays until
    the supervisor removes it: by then every process knows what was found. `all_serve` says whether every process serves.
    """

    def __init__(self, folder: Path, all_serve: Callable[[], bool]) -> None:
        self._path = folder / _FILE
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._all_serve = all_serve
        # Notified when `all_serve` may have changed.
        self._changed = threading.Condition()
        # Held during a trial of this process.
        self._own = threading.Lock()

    def begin(self) -> bool:
        """Return whether the caller may run a suspect now. If so, it calls `end` afterwards."""
        if not self._all_serve() or not self._own.acquire(blocking=False):
            return False
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._own.release()
            return False
        if os.fstat(self._file).st_size:
            self._release()
            return False
        os.pwrite(self._file, b"1", 0)
        return True

    def processes_changed(self) -> None:
        """Note that `all_serve` may return something else, and that the supervisor may have removed an ended trial."""
        with self._changed:
            self._changed.notify_all()

    def await_free(self) -> None:
        """Wait until `begin` may succeed. Another caller may be faster."""
        # A file of its own, because a lock belongs to an opened file, and this process may hold the other's.
        with open(self._path, "rb") as waiting:
            fcntl.flock(waiting, fcntl.LOCK_EX)
            fcntl.flock(waiting, fcntl.LOCK_UN)
            with self._changed:
                self._changed.wait_for(lambda: self._all_serve() and not os.fstat(waiting.fileno()).st_size)

    def end(self) -> None:
        """End the trial, on any thread."""
        os.ftruncate(self._file, 0)
        self._release()

    def _release(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)
        self._own.release()


def remove_ended(folder: Path) -> None:
    """Permit trials again, after a process ended during one and was replaced. The supervisor calls this."""
    with suppress(FileNotFoundError):
        os.truncate(folder / _FILE, 0)
