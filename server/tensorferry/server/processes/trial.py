"""The trial of a suspect: one at a time of all processes, and only while all of them serve.

So a request that ends processes ends only one at a time, and the others serve meanwhile.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable
from pathlib import Path


class Trial:
    """The right to run a suspect, which the processes share by a lock of a file. Thread-safe.

    The kernel ends the lock of a process that dies. `all_serve` says whether every process serves.
    """

    def __init__(self, folder: Path, all_serve: Callable[[], bool]) -> None:
        self._file = os.open(folder / "trial", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._all_serve = all_serve
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
        return True

    def end(self) -> None:
        """End the trial, on any thread."""
        fcntl.flock(self._file, fcntl.LOCK_UN)
        self._own.release()
