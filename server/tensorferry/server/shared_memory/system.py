"""System shared memory: a part of a POSIX shared memory file.

It is read and written through its file rather than mapped. A client may cut the file short, or
its file system may be full, at any time: a system call then says so, where a mapping would kill the
server. And what was read is a copy, so what was checked of it stays true whatever the client does.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from tensorferry.server.errors import InvalidRequestError, LimitError, NotFoundError, truncate

# Where Linux has the files of POSIX shared memory.
DIRECTORY = Path("/dev/shm")
# Triton's own, which its clients cannot register there.
_RESERVED_KEYS = "triton_python_backend_shm_region_"
_LONGEST_KEY = 255


@dataclass(frozen=True, slots=True)
class SystemSharedMemory:
    """A part of a file, open while this is kept. Its owner closes it when nobody uses it any more."""

    name: str
    key: str
    offset: int
    nbytes: int
    file: int

    def read(self, offset: int, nbytes: int) -> bytes:
        """What is there now, copied."""
        at, left = self.offset + offset, nbytes
        pieces: list[bytes] = []
        # Linux gives at most 2 GiB at a time.
        while left:
            piece = os.pread(self.file, left, at)
            if not piece:
                raise self._smaller()
            pieces.append(piece)
            left -= len(piece)
            at += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def write(self, offset: int, data: memoryview) -> None:
        """Puts these bytes there."""
        at = self.offset + offset
        try:
            if os.fstat(self.file).st_size < at + len(data):
                raise self._smaller()
            while data:
                written = os.pwrite(self.file, data, at)
                data, at = data[written:], at + written
        except OSError as error:
            raise LimitError(
                f"shared memory region {truncate(self.name)!r} cannot be written to: {error.strerror}"
            ) from None

    def close(self) -> None:
        """Closes the file."""
        os.close(self.file)

    def _smaller(self) -> InvalidRequestError:
        return InvalidRequestError(
            f"shared memory region {truncate(self.name)!r}: the file of key {truncate(self.key)!r} has become smaller since it was registered"
        )


def open_system_memory(directory: Path, name: str, key: str, offset: int, nbytes: int) -> SystemSharedMemory:
    """`nbytes` from `offset` on of the file that the key names. A ServerError says why it cannot be had."""
    file = _opened(_path_of(directory, name, key), key)
    size = os.fstat(file).st_size
    if not nbytes or offset + nbytes > size:
        os.close(file)
        raise InvalidRequestError(
            f"failed to register shared memory region {truncate(name)!r}: invalid args: {nbytes} bytes from offset {offset}, "
            f"of a file of {size} bytes"
        )
    return SystemSharedMemory(name, key, offset, nbytes, file)


def _path_of(directory: Path, name: str, key: str) -> Path:
    """The one file that a key names: its directory is that of shared memory, and nothing leads out of it."""
    file = key.lstrip("/")
    if file.startswith(_RESERVED_KEYS):
        raise InvalidRequestError(
            f"cannot register shared memory region {truncate(name)!r} with key {truncate(key)!r} as the key contains the reserved prefix "
            f"{_RESERVED_KEYS!r}"
        )
    if not file or "/" in file or "\0" in file or file in (".", "..") or len(file.encode()) > _LONGEST_KEY:
        raise InvalidRequestError(
            f"cannot register shared memory region {truncate(name)!r} - invalid shm key {truncate(key)!r}: it must name one file, without "
            f"further slashes, of at most {_LONGEST_KEY} bytes"
        )
    return directory / file


def _opened(path: Path, key: str) -> int:
    try:
        # Neither a link that leads elsewhere is followed, nor a pipe waited for.
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise NotFoundError(
            f"Unable to open shared memory region: {truncate(key)!r}: {error.strerror}"
        ) from None
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise NotFoundError(f"Unable to open shared memory region: {truncate(key)!r}: it is no shared memory")
    return file
