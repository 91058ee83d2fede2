"""What was found out about a model file, kept in the user's cache directory between loads."""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

_log = logging.getLogger("tensorferry.server")

_T = TypeVar("_T")

# Where a tensor of an ONNX file names the file that has its elements: key "location" of a StringStringEntryProto.
_LOCATION = re.compile(rb"\x0a\x08location\x12([\x80-\xff]*[\x00-\x7f])")


def cache_directory() -> Path | None:
    """`$XDG_CACHE_HOME/tensorferry`, by default `~/.cache/tensorferry`; None where there is no home."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(given):
        return Path(given) / "tensorferry"
    try:
        return Path.home() / ".cache" / "tensorferry"
    except RuntimeError:
        return None


def digest_of(path: Path, about: str) -> str:
    """A digest of a model's file, the files that have its weights, and what else the finding depends on."""
    digest = hashlib.sha256(about.encode())
    for each in (path, *_unless_changed(_external_data, path)):
        # Bytes of weights that look like a reference to a file seldom name one.
        if os.path.isfile(each):
            digest.update(_unless_changed(_digest, each))
    return digest.hexdigest()


def _unless_changed(function: Callable[[Path, int, int, int], _T], path: Path) -> _T:
    """What the function says of a file, which it reads once for as long as the file is the same."""
    status = path.stat()
    return function(path, status.st_ino, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=1024)
def _digest(path: Path, _inode: int, _modified: int, _size: int) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


@lru_cache(maxsize=1024)
def _external_data(path: Path, _inode: int, _modified: int, size: int) -> list[Path]:
    """The files that a model may refer to."""
    if not size:
        return []
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        names = set(_locations(data))
    return sorted(path.parent / name for name in names)


def _locations(data: mmap.mmap) -> Iterator[Path]:
    for match in _LOCATION.finditer(data):
        length = sum((byte & 127) << 7 * place for place, byte in enumerate(match[1]))
        name = data[match.end() : match.end() + length]
        with suppress(UnicodeDecodeError):
            if b"\0" not in name:
                yield Path(name.decode())


class ProbeCache:
    """Findings of one kind, each in a file named by its digest. A directory that cannot be used is no cache."""

    def __init__(self, kind: str) -> None:
        directory = cache_directory()
        self._directory = None if directory is None else directory / kind

    def find(self, digest: str) -> Any:
        """The finding, as `keep` got it; None where there is none."""
        if self._directory is None:
            return None
        try:
            return json.loads((self._directory / f"{digest}.json").read_bytes())
        except (OSError, ValueError):
            return None

    def keep(self, digest: str, finding: Any) -> None:
        """Writes a finding; a reader sees all of it or nothing."""
        if self._directory is None:
            return
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self._directory, suffix=".part")
            try:
                with os.fdopen(handle, "w") as file:
                    json.dump(finding, file)
                os.replace(name, self._directory / f"{digest}.json")
            except BaseException:
                os.unlink(name)
                raise
        except OSError as error:
            _log.debug("%s keeps nothing of what is found out about models: %s", self._directory, error)
