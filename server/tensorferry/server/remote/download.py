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

from tensorferry.server.private_files import open_private
from tensorferry.server.remote.failures import RemoteError, TooSlowError, UnreachableError
from tensorferry.server.remote.progress import DownloadProgress, size_text
from tensorferry.server.remote.stores import RemoteFile, Store

_log = logging.getLogger("tensorferry.server")

# Attempts in a row that bring no byte before a download fails, and the pause after the first; it doubles.
_ATTEMPTS = 4
_PAUSE_SECONDS = 1.0
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
# The largest file whose host does not say its size.
LARGEST_BYTES = 16 << 30
# Free space that a download leaves on the disk, and how many bytes it writes between two looks at it.
SPARE_BYTES = 256 << 20
_LOOK_BYTES = 64 << 20


class Downloader:
    """Downloads files, with limits of their size. `now` returns monotonic seconds, `pause` waits for some.

    The limits of time are those of the store.
    """

    def __init__(
        self, now: Callable[[], float] = time.monotonic, pause: Callable[[float], object] = time.sleep
    ) -> None:
        self._now = now
        self._pause = pause

    def download(self, store: Store, file: RemoteFile, target: Path) -> str:
        """Download a file to a path, where a part of the same version may be. Return its SHA-256.

        UnreachableError if the host is the cause: what has arrived stays, for the next attempt. RemoteError if the file
        is too large, or not what the host states: it is removed.
        """
        if file.version is None:
            # It is unknown whether a part is of the same version.
            target.unlink(missing_ok=True)
        _check_space(file, target)
        try:
            self._bring(store, file, target)
        except BaseException:
            if file.version is None:
                # No later attempt can continue it.
                target.unlink(missing_ok=True)
            raise
        _write_to_disk(target)
        digest = sha256_of(target)
        if file.sha256 is not None and digest != file.sha256:
            target.unlink()
            raise RemoteError(
                f"{file.url} arrived with sha256={digest}, its host says sha256={file.sha256}: it was damaged on the way and "
                "is removed; try again"
            )
        return digest

    def _bring(self, store: Store, file: RemoteFile, target: Path) -> None:
        """Make the target whole, by as many requests as bring bytes."""
        progress = DownloadProgress(str(file.url), _size(target), file.size, self._now)
        # An empty file needs no request.
        open_private(target, "ab").close()
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

    def _attempt(
        self, store: Store, file: RemoteFile, target: Path, progress: DownloadProgress
    ) -> UnreachableError | None:
        """Append what one request brings; return why it ended early, if the host is the cause."""
        try:
            start, chunks = store.read(file, _size(target))
            with _writing(file, target), open_private(target, "ab") as output:
                if start != output.tell():
                    output.truncate(start)
                look = start
                for chunk in chunks:
                    start += len(chunk)
                    _check_size(file, start)
                    if start >= look:
                        _check_space(file, target)
                        look = start + _LOOK_BYTES
                    output.write(chunk)
                    progress.update(start)
        except TooSlowError:
            raise
        except UnreachableError as error:
            return error
        return None


def _check_size(file: RemoteFile, size: int) -> None:
    """Raise RemoteError if the first `size` bytes of a file are more than it may have."""
    if file.size is not None and size > file.size:
        raise RemoteError(
            f"{file.url} has at least {size} bytes, but its host says {file.size}: it is refused and removed; try again"
        )
    if file.size is None and size > LARGEST_BYTES:
        raise RemoteError(
            f"{file.url} has more than {size_text(LARGEST_BYTES)}, the largest file whose host does not say its size: it is "
            "refused and removed; use a host that sends Content-Length"
        )


def _check_space(file: RemoteFile, target: Path) -> None:
    missing = max(0, (file.size or 0) - _size(target))
    free = shutil.disk_usage(target.parent).free
    if missing + SPARE_BYTES > free:
        needed = f"needs {size_text(missing)}" if missing else "is being downloaded"
        raise RemoteError(
            f"{file.url} {needed}, but {target.parent} has {size_text(free)} free, and {size_text(SPARE_BYTES)} must stay "
            "free: make room, or name another directory by --model-cache"
        )


@contextmanager
def _writing(file: RemoteFile, target: Path) -> Iterator[None]:
    """Context of writes to the cache: a full disk becomes a RemoteError, after which nothing is left."""
    try:
        yield
    except UnreachableError:
        raise
    except RemoteError:
        target.unlink(missing_ok=True)
        raise
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise
        target.unlink(missing_ok=True)
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
