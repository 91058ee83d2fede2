"""Download of one file, continued where an earlier attempt ended."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tensorferry.server.remote.failures import RemoteError, UnreachableError
from tensorferry.server.remote.progress import DownloadProgress, size_text
from tensorferry.server.remote.stores import RemoteFile, Store

_log = logging.getLogger("tensorferry.server")

# Attempts in a row that bring no byte before a download fails, and the pause after the first; it doubles.
_ATTEMPTS = 4
_PAUSE_SECONDS = 1.0
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class Downloader:
    """Downloads files. `now` returns monotonic seconds, `pause` waits for some."""

    def __init__(
        self, now: Callable[[], float] = time.monotonic, pause: Callable[[float], object] = time.sleep
    ) -> None:
        self._now = now
        self._pause = pause

    def download(self, store: Store, file: RemoteFile, target: Path) -> str:
        """Download a file to a path, where a part of the same version may be. Return its SHA-256.

        RemoteError if it cannot be downloaded: what has arrived stays, for the next attempt. RemoteError, too, if the
        content is not what the host states: it is removed.
        """
        if file.version is None:
            # It is unknown whether a part is of the same version.
            target.unlink(missing_ok=True)
        self._check_space(file, target)
        progress = DownloadProgress(str(file.url), _size(target), file.size, self._now)
        failures = 0
        while file.size is None or _size(target) < file.size:
            before = _size(target)
            problem = self._attempt(store, file, target, progress)
            if problem is None and file.size is None:
                break
            got = _size(target)
            if file.size is not None and got >= file.size:
                break
            failures = 0 if got > before else failures + 1
            if problem is None:
                problem = UnreachableError(
                    f"{file.url} is truncated: {got} bytes arrived, it has {file.size}; try again"
                )
            if failures == _ATTEMPTS:
                raise problem
            if failures:
                self._pause(_PAUSE_SECONDS * 2 ** (failures - 1))
            _log.debug("%s; the download is continued at byte %d", problem, got)
        self._check_size(file, target)
        _write_to_disk(target)
        digest = sha256_of(target)
        if file.sha256 is not None and digest != file.sha256:
            target.unlink()
            raise RemoteError(
                f"{file.url} arrived with sha256={digest}, its host says sha256={file.sha256}: it was damaged on the way and "
                "is removed; try again"
            )
        return digest

    def _attempt(
        self, store: Store, file: RemoteFile, target: Path, progress: DownloadProgress
    ) -> UnreachableError | None:
        """Append what one request brings; return why it ended early, if the host is the cause."""
        try:
            start, chunks = store.read(file, _size(target))
            with _writing(file, target), target.open("ab") as output:
                if start != output.tell():
                    output.truncate(start)
                for chunk in chunks:
                    output.write(chunk)
                    start += len(chunk)
                    progress.update(start)
        except UnreachableError as error:
            return error
        return None

    def _check_space(self, file: RemoteFile, target: Path) -> None:
        missing = (file.size or 0) - _size(target)
        free = shutil.disk_usage(target.parent).free
        if missing > free:
            raise RemoteError(
                f"{file.url} needs {size_text(missing)}, but {target.parent} has {size_text(free)} free: make room, or name "
                "another directory by --model-cache"
            )

    def _check_size(self, file: RemoteFile, target: Path) -> None:
        got = _size(target)
        if file.size is not None and got > file.size:
            target.unlink()
            raise RemoteError(f"{file.url} has {got} bytes, but its host says {file.size}; try again")


@contextmanager
def _writing(file: RemoteFile, target: Path) -> Iterator[None]:
    """Context of writes to the cache: a full disk becomes a RemoteError."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise
        raise RemoteError(
            f"{file.url} cannot be stored in {target.parent}: {os.strerror(error.errno)}; make room, or name another "
            "directory by --model-cache"
        ) from None


def _write_to_disk(path: Path) -> None:
    """Wait until a file is on the disk, so that it is whole after a loss of power, too."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
