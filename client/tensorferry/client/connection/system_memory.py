"""Files of POSIX shared memory, as a server of this machine opens them."""

from __future__ import annotations

import mmap
import os
import uuid
from pathlib import Path

# Linux's directory of POSIX shared memory files.
DIRECTORY = Path("/dev/shm")


class SystemMemory:
    """A new file of shared memory, mapped. `key` is its name, which no other file has.

    Only processes of the same user can open it. Arrays over `buffer` stay usable after `close`.
    Raises OSError if the memory cannot be had.
    """

    def __init__(self, nbytes: int) -> None:
        self.key = f"tensorferry-{uuid.uuid4().hex}"
        self.nbytes = nbytes
        self._path = DIRECTORY / self.key
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # Reserves the memory. With a sparse file, a full /dev/shm would end the process at a write.
            os.posix_fallocate(file, 0, nbytes)
            self.buffer = mmap.mmap(file, nbytes)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(file)

    def close(self) -> None:
        """Remove the file; its memory is free once no process has it open or mapped."""
        self._path.unlink(missing_ok=True)
