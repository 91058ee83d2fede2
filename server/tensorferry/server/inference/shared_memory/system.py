"""System shared memory: a part of a POSIX shared memory file.

The file is read and written by system calls, not mapped. A client may shorten the file, or its file system may be full:
a system call then returns an error, while access to a mapping would kill the server. A read copies, so the client cannot
change what was checked.
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from tensorferry.server.errors import InvalidRequestError, LimitError, NotFoundError, truncate

# Linux's directory of POSIX shared memory files.
DIRECTORY = Path("/dev/shm")
# Reserved by Triton for its own files.
_RESERVED_KEYS = "triton_python_backend_shm_region_"
_MAX_KEY_BYTES = 255
# Errors of a process or machine that can open no more files.
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


@dataclass(frozen=True, slots=True)
class SystemSharedMemory:
    """A part of an open file. Its owner closes it after the last use."""

    name: str
    key: str
    offset: int
    nbytes: int
    file: int

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return a copy of the bytes."""
        at, missing = self.offset + offset, nbytes
        pieces: list[bytes] = []
        # In a loop, because Linux reads at most 2 GiB at a time.
        while missing:
            piece = os.pread(self.file, missing, at)
            if not piece:
                raise self._file_shortened()
            pieces.append(piece)
            missing -= len(piece)
            at += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def write(self, offset: int, data: memoryview) -> None:
        """Write these bytes there."""
        at = self.offset + offset
        try:
            if os.fstat(self.file).st_size < at + len(data):
                raise self._file_shortened()
            while data:
                written = os.pwrite(self.file, data, at)
                data, at = data[written:], at + written
        except OSError as error:
            raise LimitError(
                f"shared memory region {truncate(self.name)!r} cannot be written to: {error.strerror}"
            ) from None

    def close(self) -> None:
        """Close the file."""
        os.close(self.file)

    def _file_shortened(self) -> InvalidRequestError:
        return InvalidRequestError(
            f"shared memory region {truncate(self.name)!r}: the file of key {truncate(self.key)!r} has become smaller since it was registered"
        )


def open_system_memory(directory: Path, name: str, key: str, offset: int, nbytes: int) -> SystemSharedMemory:
    """Open `nbytes` at `offset` of the file that the key names. Raises a ServerError."""
    file = _open_file(_path_of(directory, name, key), key)
    size = os.fstat(file).st_size
    if not nbytes or offset + nbytes > size:
        os.close(file)
        raise InvalidRequestError(
            f"failed to register shared memory region {truncate(name)!r}: invalid args: {nbytes} bytes from offset {offset}, "
            f"of a file of {size} bytes"
        )
    return SystemSharedMemory(name, key, offset, nbytes, file)


def _path_of(directory: Path, name: str, key: str) -> Path:
    """Return the file that a key names. It is directly in the directory, never outside."""
    file = key.lstrip("/")
    if file.startswith(_RESERVED_KEYS):
        raise InvalidRequestError(
            f"cannot register shared memory region {truncate(name)!r} with key {truncate(key)!r} as the key contains the reserved prefix "
            f"{_RESERVED_KEYS!r}"
        )
    if not file or "/" in file or "\0" in file or file in (".", "..") or len(file.encode()) > _MAX_KEY_BYTES:
        raise InvalidRequestError(
            f"cannot register shared memory region {truncate(name)!r} - invalid shm key {truncate(key)!r}: it must name one file, without "
            f"further slashes, of at most {_MAX_KEY_BYTES} bytes"
        )
    return directory / file


def _open_file(path: Path, key: str) -> int:
    try:
        # Follows no symbolic link and does not wait for a pipe.
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        kind = LimitError if error.errno in _NO_ROOM else NotFoundError
        raise kind(f"Unable to open shared memory region: {truncate(key)!r}: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise NotFoundError(f"Unable to open shared memory region: {truncate(key)!r}: it is no shared memory")
    return file
