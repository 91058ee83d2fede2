"""Trees of files in the cache: made from what a host has, with what has not changed taken from the last tree."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tensorferry.server.remote.cache import CachedFile, CachedTree, CacheEntry, Record, Tree, digest_of
from tensorferry.server.remote.download import Downloader
from tensorferry.server.remote.failures import RemoteError
from tensorferry.server.remote.progress import size_text
from tensorferry.server.remote.stores import RemoteFile, Store
from tensorferry.server.remote.url import RemoteUrl

_log = logging.getLogger("tensorferry.server")


@dataclass(frozen=True, slots=True)
class _Obtained:
    """A complete file beside the trees."""

    path: Path
    file: CachedFile


class TreeBuilder:
    """Makes the tree of one part of a record. The lock of `entry` must be held.

    `part` is the key of the tree in the record. Call `add` for each file, then `finish`.
    """

    def __init__(
        self, entry: CacheEntry, record: Record, part: str, store: Store, downloader: Downloader
    ) -> None:
        self._entry = entry
        self._record = record
        self._part = part
        self._store = store
        self._downloader = downloader
        self._before = record.trees.get(part)
        self._tree_before = None if self._before is None else entry.tree(self._before.digest)
        self._obtained: dict[str, _Obtained] = {}

    def unchanged(self, files: Mapping[str, RemoteFile]) -> Tree | None:
        """Return the last tree if it has exactly these files in these versions."""
        if self._before is None or self._tree_before is None or files.keys() != self._before.files.keys():
            return None
        return self._tree_before if all(map(self._has, files, files.values())) else None

    def _has(self, name: str, file: RemoteFile) -> bool:
        """Return whether the last tree has this version of a file."""
        if self._before is None or self._tree_before is None or file.version is None:
            return False
        known = self._before.files.get(name)
        return known is not None and known.version == file.version and file.size in (None, known.size)

    def add(self, name: str, file: RemoteFile, pin: str | None = None) -> Path:
        """Obtain a file; return its path for now. RemoteError if it does not have the hash `pin`: it is removed."""
        place = f"{self._part}/{name}"
        if self._before is not None and self._tree_before is not None and self._has(name, file):
            digest = self._before.files[name].sha256
            # Never where a download could be continued, because that would write into the last tree.
            target = self._entry.partial(place, f"link to {digest}")
            target.unlink(missing_ok=True)
            _link(self._tree_before.path / name, target)
        else:
            target = self._entry.partial(place, file.version)
            began = time.monotonic()
            digest = self._downloader.download(self._store, file, target)
            size = target.stat().st_size
            _log.info(
                "fetched %s: %s in %.1f s, sha256=%s",
                file.url,
                size_text(size),
                time.monotonic() - began,
                digest,
            )
        if pin is not None and digest != pin:
            target.unlink()
            raise wrong_hash(file.url, digest, pin)
        self._obtained[name] = _Obtained(target, CachedFile(file.version, target.stat().st_size, digest))
        return target

    def finish(self) -> Tree:
        """Make the tree of the files, and write it into the record."""
        files = {name: obtained.file for name, obtained in self._obtained.items()}
        digest = digest_of({name: file.sha256 for name, file in files.items()})
        tree = self._entry.add_tree(
            {name: obtained.path for name, obtained in self._obtained.items()}, digest
        )
        self._record.trees[self._part] = CachedTree(digest, files)
        self._entry.write(self._record)
        return tree


def wrong_hash(url: RemoteUrl, received: str, pin: str) -> RemoteError:
    """Return the error of a file that does not have its pinned hash."""
    return RemoteError(
        f"{url} has sha256={received}, but sha256={pin} is pinned: it is refused and removed; use the file that was meant, or "
        "pin the other hash if you trust it"
    )


def is_safe(name: str) -> bool:
    """Return whether a relative path stays in its directory."""
    parts = PurePosixPath(name).parts
    return (
        bool(parts)
        and not name.startswith("/")
        and ".." not in parts
        and not any(ord(character) < 32 or character == "\\" for character in name)
    )


def require_safe(url: RemoteUrl, names: Iterable[str]) -> None:
    """Raise RemoteError for the first name that leads out of its directory."""
    for name in names:
        if not is_safe(name):
            raise RemoteError(
                f"{url} names {name!r}, which is not below its directory; such a file is not fetched"
            )


def _link(source: Path, target: Path) -> None:
    """Give a file a second name; copy it where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


StoreOf = Callable[[RemoteUrl], Store]
