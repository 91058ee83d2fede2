"""Calls of a store in threads of their own, within limits of time, size and space."""

from __future__ import annotations

import hashlib
import io
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tensorferry.server.models.remote.failures import RemoteError, UnreachableError, failure_of
from tensorferry.server.models.remote.url import RemoteUrl
from tensorferry.server.system.private_files import make_private_folder, private_opener
from tensorferry.server.system.threads import ThreadKind, new_thread

_log = logging.getLogger("tensorferry.server")

_T = TypeVar("_T")

# Time between two lines of progress in the log.
_PROGRESS_SECONDS = 5.0
_ADVICE = "check the host and the network, or copy the model to this machine and serve the copy"


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file as its host describes it.

    `version` differs if the content does: an ETag, a commit, or a time; None if the host gives nothing like it. `size` is
    in bytes, None if unknown. `sha256` is the hash that the host states, None if it states none.
    """

    url: RemoteUrl
    version: str | None
    size: int | None
    sha256: str | None = None


class Store(Protocol):
    """A kind of host. Methods may raise what its library raises. Repositories are only at hosts that have lists."""

    def describe(self, url: RemoteUrl) -> RemoteFile:
        """Return the current state of a file."""
        ...

    def read(self, file: RemoteFile, output: io.FileIO) -> None:
        """Write the content of a file. ChangedError if the file is no longer as described."""
        ...

    def list(self, url: RemoteUrl) -> Mapping[str, RemoteFile]:
        """Return all files of a directory and below, by their paths in it."""
        raise RemoteError(f"{url}: its host cannot list files")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a host.

    In each `window_seconds` it must answer, or `window_bytes` of a file must arrive. A model and the files beside it must
    arrive in `whole_seconds`. `largest_bytes` is for a file of unknown size. `spare_bytes` of the disk stay free.
    """

    window_seconds: float = 120.0
    window_bytes: int = 1 << 20
    whole_seconds: float = 6 * 3600.0
    largest_bytes: int = 16 << 30
    spare_bytes: int = 256 << 20


LIMITS = Limits()


class Fetch:
    """Calls of a store for one model, or one version of a model. RemoteError if one fails or exceeds a limit."""

    def __init__(self, store: Store, limits: Limits = LIMITS) -> None:
        self._store = store
        self._limits = limits
        self._end = time.monotonic() + limits.whole_seconds
        self._arrived = 0
        self._given_up = False

    def describe(self, url: RemoteUrl) -> RemoteFile:
        """Return the current state of a file."""
        return self._call(url, lambda: self._store.describe(url))

    def list(self, url: RemoteUrl) -> Mapping[str, RemoteFile]:
        """Return all files of a directory and below."""
        return self._call(url, lambda: self._store.list(url))

    def download(self, file: RemoteFile, path: Path) -> str:
        """Download a file; return its SHA-256. The caller removes what is left of a download that fails."""
        began = time.monotonic()
        make_private_folder(path.parent)
        self.check_space(file.url, path.parent, file.size or 0)
        # Opened here: a thread that was given up must not open the file of a later attempt.
        output = _Output(path, partial(self._admit, file, path.parent))

        def read() -> None:
            with output:
                self._store.read(file, output)

        self._call(file.url, read, file)
        with path.open("rb") as arrived:
            # So that the file is whole after a loss of power, too. Here, because a slow disk is no slow host.
            os.fsync(arrived.fileno())
        size, digest = path.stat().st_size, sha256_of(path)
        if file.size is not None and size < file.size:
            raise UnreachableError(
                f"{file.url} is truncated: {size} bytes arrived, it has {file.size}; try again"
            )
        if file.sha256 not in (None, digest):
            raise RemoteError(
                f"{file.url} arrived with sha256={digest}, its host says sha256={file.sha256}: it was damaged on the way and "
                "is removed; try again"
            )
        seconds = time.monotonic() - began
        _log.info("fetched %s: %s in %.1f s, sha256=%s", file.url, size_text(size), seconds, digest)
        return digest

    def _call(self, url: RemoteUrl, call: Callable[[], _T], file: RemoteFile | None = None) -> _T:
        """Return what a call returns. UnreachableError if it exceeds a limit of time.

        A thread, because no library limits the time of a whole answer: each byte that arrives restarts its timeouts. A
        thread that is given up ends at its next byte, and never delays the end of the process.
        """
        future: Future[_T] = Future()

        def run() -> None:
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(failure_of(url, error))

        limits, first = self._limits, self._arrived
        window, before = time.monotonic(), first
        new_thread("download", run, ThreadKind.EXPENDABLE).start()
        try:
            while not wait([future], min(_PROGRESS_SECONDS, limits.window_seconds)).done:
                now, arrived = time.monotonic(), self._arrived - before
                if now > self._end:
                    raise UnreachableError(
                        f"{url} has not arrived within {limits.whole_seconds:g} s, the longest time for a model with its files; "
                        f"{_ADVICE}"
                    )
                if now - window >= limits.window_seconds:
                    if arrived < limits.window_bytes:
                        raise UnreachableError(
                            f"{url}: the host sent {size_text(arrived)} in {limits.window_seconds:g} s; it must answer, and send "
                            f"{size_text(limits.window_bytes)}, in that time: {_ADVICE}"
                        )
                    window, before = now, self._arrived
                if file is not None and file.size:
                    done = self._arrived - first
                    _log.info("%s: %s downloaded (%.0f %%)", url, size_text(done), 100 * done / file.size)
            return future.result()
        finally:
            self._given_up = not future.done()

    def _admit(self, file: RemoteFile, folder: Path, size: int, more: int) -> None:
        """Raise RemoteError if `more` bytes may not be written to a file of `size` bytes."""
        largest = self._limits.largest_bytes if file.size is None else file.size
        if self._given_up:
            raise RemoteError(f"{file.url} was given up")
        if size + more > largest:
            said = "the most without Content-Length" if file.size is None else "as its host says"
            raise RemoteError(
                f"{file.url} has more than {largest} bytes, {said}: it is refused and removed; use another host"
            )
        self.check_space(file.url, folder, more)
        self._arrived += more

    def check_space(self, url: RemoteUrl, folder: Path, needed: int) -> None:
        """Raise RemoteError if a directory has too little space for `needed` bytes."""
        free, spare = shutil.disk_usage(folder).free, self._limits.spare_bytes
        if needed + spare > free:
            raise RemoteError(
                f"{url} needs {size_text(needed)}, but {folder} has {size_text(free)} free, and {size_text(spare)} must stay "
                "free: make room, or name another directory by --model-cache"
            )


class _Output(io.FileIO):
    """File of a download. `admit` is called with its size and the bytes to add, and raises RemoteError to refuse them."""

    def __init__(self, path: Path, admit: Callable[[int, int], None]) -> None:
        super().__init__(path, "w", opener=private_opener)
        self._admit = admit

    def write(self, data: Any, /) -> int:
        self._admit(self.tell(), len(data))
        rest = memoryview(data)
        while rest:
            rest = rest[super().write(rest) :]
        return len(data)


def size_text(count: float) -> str:
    """Return a number of bytes with a unit."""
    for unit in ("bytes", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
