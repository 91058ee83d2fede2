"""Cache of probe results about model files, in the user's cache directory."""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from tensorferry.server.private_files import make_private_folder

_log = logging.getLogger("tensorferry.server")

_T = TypeVar("_T")

# The name of the external data file of a tensor in an ONNX file: key "location" of a StringStringEntryProto.
_LOCATION = re.compile(rb"\x0a\x08location\x12([\x80-\xff]*[\x00-\x7f])")


def cache_directory() -> Path | None:
    """Return `$XDG_CACHE_HOME/tensorferry`, by default `~/.cache/tensorferry`; None if there is no home directory."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(given):
        return Path(given) / "tensorferry"
    try:
        return Path.home() / ".cache" / "tensorferry"
    except RuntimeError:
        return None


def digest_of(path: Path, conditions: str, libraries: Iterable[Path] = ()) -> str:
    """Return a digest of a model's file, its external data, its libraries, and the conditions of the result."""
    digest = hashlib.sha256(conditions.encode())
    for each in (path, *_cached_by_status(_external_data, path), *libraries):
        # Weights may contain bytes that look like a reference to a file, but rarely name an existing one.
        if os.path.isfile(each):
            digest.update(_cached_by_status(_digest, each))
    return digest.hexdigest()


def _cached_by_status(function: Callable[[Path, int, int, int], _T], path: Path) -> _T:
    """Call a cached function with a file and its status, so that it reads an unchanged file once."""
    status = path.stat()
    return function(path, status.st_ino, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=1024)
def _digest(path: Path, _inode: int, _modified: int, _size: int) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


@lru_cache(maxsize=1024)
def _external_data(path: Path, _inode: int, _modified: int, size: int) -> list[Path]:
    """Return the files to which a model may refer."""
    if not size:
        return []
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        names = set(_locations(data))
    return sorted(path.parent / name for name in names)


def _locations(data: mmap.mmap) -> Iterator[Path]:
    for match in _LOCATION.finditer(data):
        length = sum((byte & 127) << 7 * index for index, byte in enumerate(match[1]))
        name = data[match.end() : match.end() + length]
        with suppress(UnicodeDecodeError):
            if b"\0" not in name:
                yield Path(name.decode())


class ProbeCache:
    """Results of one kind, each in a file named by its digest. An unusable directory disables the cache."""

    def __init__(self, kind: str) -> None:
        directory = cache_directory()
        self._directory = None if directory is None else directory / kind

    def get(self, digest: str) -> Any:
        """Return the result that `put` stored; None if there is none."""
        if self._directory is None:
            return None
        try:
            return json.loads((self._directory / f"{digest}.json").read_bytes())
        except (OSError, ValueError):
            return None

    def put(self, digest: str, result: Any) -> None:
        """Store a result atomically."""
        if self._directory is None:
            return
        try:
            make_private_folder(self._directory)
            handle, name = tempfile.mkstemp(dir=self._directory, suffix=".part")
            try:
                with os.fdopen(handle, "w") as file:
                    json.dump(result, file)
                os.replace(name, self._directory / f"{digest}.json")
            except BaseException:
                os.unlink(name)
                raise
        except OSError as error:
            _log.debug("probe results cannot be stored in %s: %s", self._directory, error)
