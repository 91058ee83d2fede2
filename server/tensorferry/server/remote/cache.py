"""The local cache: one directory for each address, with trees of files that never change.

    CACHE/KEY/lock                   held by the process that fetches
    CACHE/KEY/record.json            what was fetched, and how the host described it
    CACHE/KEY/partial/NAME           parts of files, to be continued
    CACHE/KEY/trees/DIGEST/...       complete files
    CACHE/KEY/trees/DIGEST.lock      held, shared, by every process that uses the tree

A tree is made beside its place and then renamed, so it is complete if it exists. Two processes can use one cache. CACHE/KEY
is private, and so is everything in it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tensorferry.server.private_files import make_private, make_private_folder, open_private
from tensorferry.server.remote.failures import RemoteError
from tensorferry.server.remote.url import RemoteUrl

_log = logging.getLogger("tensorferry.server")

# The name of a directory of an address.
_KEY = re.compile(r".*-[0-9a-f]{24}")


def default_cache() -> Path:
    """Return the directory of the cache if the operator names none: tensorferry/models in that of the user's caches."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    # The specification says that relative paths are to be ignored.
    base = Path(home) if os.path.isabs(home) else Path(os.path.expanduser("~")) / ".cache"
    return base / "tensorferry" / "models"


@dataclass(frozen=True, slots=True)
class CachedFile:
    """A file of a tree, as its host described it when it was fetched."""

    version: str | None
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class CachedTree:
    """A tree and its files, by their relative paths."""

    digest: str
    files: Mapping[str, CachedFile]


@dataclass(slots=True)
class Record:
    """What is in the cache for an address. A model has one tree, a repository one for each part.

    `listing` has the version and size of each file of a repository.
    """

    url: str
    trees: dict[str, CachedTree] = field(default_factory=dict)
    listing: dict[str, tuple[str | None, int | None]] = field(default_factory=dict)


class Tree:
    """A directory of files that do not change. It stays at least as long as this object."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lock = open_private(_lock_of(path), "ab")
        weakref.finalize(self, lock.close)
        fcntl.flock(lock, fcntl.LOCK_SH)


class CacheEntry:
    """The cache's directory of one address. Every method but `locked` needs the lock that `locked` holds."""

    def __init__(self, cache: Path, url: RemoteUrl) -> None:
        self.url = url
        self.path = cache / url.key
        self._trees = self.path / "trees"
        self._partial = self.path / "partial"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of this address, for which other processes wait. RemoteError if the cache cannot be written."""
        try:
            for folder in (self._trees, self._partial):
                make_private_folder(folder)
            with open_private(self.path / "lock", "ab") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    _log.info("%s: another process is fetching it; waiting for that", self.url)
                    fcntl.flock(lock, fcntl.LOCK_EX)
                self._make_private()
                yield
        except OSError as error:
            raise RemoteError(
                f"{self.url}: the cache {self.path} cannot be used: {error.strerror or error}; name a directory that this "
                "process may write by --model-cache"
            ) from None

    def _make_private(self) -> None:
        """Make what an earlier version has left private, and the cache itself if nothing else is in it."""
        cache = self.path.parent
        try:
            make_private(self.path)
            others_write = cache.stat().st_mode & 0o022
            if not others_write and all(_KEY.fullmatch(entry.name) for entry in cache.iterdir()):
                cache.chmod(0o700)
        except PermissionError as error:
            # It belongs to another user, or its file system has no modes.
            _log.warning(
                "%s: other users may read %s: its mode cannot be changed (%s)",
                self.url,
                error.filename,
                error.strerror,
            )

    def record(self) -> Record:
        """Return what was fetched; an empty record if nothing was, or the record is damaged."""
        try:
            read: dict[str, Any] = json.loads((self.path / "record.json").read_text())
            trees = {
                part: CachedTree(
                    tree["digest"],
                    {name: CachedFile(**values) for name, values in tree["files"].items()},
                )
                for part, tree in read["trees"].items()
            }
            listing = {name: (version, size) for name, (version, size) in read["listing"].items()}
        except FileNotFoundError:
            return Record(str(self.url))
        except (ValueError, KeyError, TypeError, AttributeError):
            _log.warning("%s: the record %s is damaged; fetching again", self.url, self.path / "record.json")
            return Record(str(self.url))
        return Record(str(self.url), trees, listing)

    def write(self, record: Record) -> None:
        """Replace the record."""
        temporary = self.path / "record.json.new"
        with open_private(temporary, "w") as file:
            json.dump(asdict(record), file, indent=1)
        temporary.replace(self.path / "record.json")

    def partial(self, name: str, version: str | None) -> Path:
        """Return where a version of a file is downloaded to. Parts of its other versions are removed."""
        prefix = hashlib.sha256(name.encode()).hexdigest()[:16]
        wanted = f"{prefix}-{hashlib.sha256(repr(version).encode()).hexdigest()[:16]}"
        for other in self._partial.glob(f"{prefix}-*"):
            if other.name != wanted:
                other.unlink()
        return self._partial / wanted

    def tree(self, digest: str) -> Tree | None:
        """Return a tree; None if it is not in the cache."""
        path = self._trees / digest
        return Tree(path) if path.is_dir() else None

    def add_tree(self, files: Mapping[str, Path], digest: str) -> Tree:
        """Move complete files into a tree, and return it."""
        path = self._trees / digest
        if path.is_dir():
            for file in files.values():
                file.unlink()
        else:
            made = self._trees / f"{digest}.new"
            shutil.rmtree(made, ignore_errors=True)
            make_private_folder(made)
            for name, file in files.items():
                target = made / name
                make_private_folder(target.parent)
                file.replace(target)
            made.rename(path)
        return Tree(path)

    def remove(self, digest: str) -> None:
        """Remove a tree whose files are damaged."""
        shutil.rmtree(self._trees / digest, ignore_errors=True)

    def remove_outdated(self, record: Record) -> None:
        """Remove the trees that the record does not have and no process uses, this one included."""
        wanted = {tree.digest for tree in record.trees.values()}
        for path in self._trees.iterdir():
            if path.is_dir() and path.name not in wanted and _is_unused(path):
                shutil.rmtree(path, ignore_errors=True)
                _lock_of(path).unlink(missing_ok=True)


def digest_of(files: Mapping[str, str]) -> str:
    """Return the name of a tree from the SHA-256 of each file."""
    lines = "".join(f"{sha256}  {name}\n" for name, sha256 in sorted(files.items()))
    return hashlib.sha256(lines.encode()).hexdigest()[:32]


def _lock_of(tree: Path) -> Path:
    return tree.with_name(f"{tree.name}.lock")


def _is_unused(tree: Path) -> bool:
    """Return whether no process uses a tree. None can begin to, because the lock of the address is held."""
    with open_private(_lock_of(tree), "ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
