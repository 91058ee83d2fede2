"""The local cache: a directory for each model, and for each part of a repository, with trees of files that never change.

    lock                   held by the process that fetches
    record.json            the files of the current tree, and how the host described them
    partial/...            the tree that is being made, which is renamed when it is complete
    trees/DIGEST/...       complete files
    trees/DIGEST.lock      held, shared, by every process that uses the tree

Two processes can use one cache. The directories are private.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from tensorferry.server.models.remote.download import Fetch, RemoteFile
from tensorferry.server.models.remote.failures import RemoteError
from tensorferry.server.models.remote.url import RemoteUrl
from tensorferry.server.system.private_files import make_private_folder, open_private

_log = logging.getLogger("tensorferry.server")


def default_cache() -> Path:
    """Return the directory of the cache if the operator names none: tensorferry/models in that of the user's caches."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    # The specification says that relative paths are to be ignored.
    if os.path.isabs(given):
        return Path(given) / "tensorferry" / "models"
    try:
        return Path.home() / ".cache" / "tensorferry" / "models"
    except RuntimeError:
        raise RemoteError(
            "models cannot be fetched, because this user has no home directory for them; name a directory by --model-cache"
        ) from None


@dataclass(frozen=True, slots=True)
class CachedFile:
    """A file of a tree, as its host described it when it was fetched."""

    version: str | None
    size: int
    sha256: str

    def is_of(self, file: RemoteFile) -> bool:
        """Return whether the host has this version."""
        return file.version is not None and file.version == self.version and file.size in (None, self.size)

    def is_at(self, path: Path) -> bool:
        """Return whether there is a file of this size."""
        return path.is_file() and path.stat().st_size == self.size


class Tree:
    """A directory of files that do not change. It stays at least as long as this object."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # NFS lets only those share a lock that can read.
        lock = open_private(_lock_of(path), "a+b")
        weakref.finalize(self, lock.close)
        fcntl.flock(lock, fcntl.LOCK_SH)


def _lock_of(tree: Path) -> Path:
    return tree.with_name(f"{tree.name}.lock")


class CacheEntry:
    """The cache's directory `path` of one address, for use within `locked`.

    `files` are those of its current tree, by their relative paths; None if there is none. Call `save` after a change.
    """

    def __init__(self, path: Path, url: RemoteUrl) -> None:
        self.path = path
        self.url = url
        self.files: Mapping[str, CachedFile] | None = None
        self.partial = path / "partial"
        self._folder = path / "trees"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of this address, for which other processes wait. RemoteError if the cache cannot be written.

        At the end, trees are removed that are not the current one and that no process uses.
        """
        try:
            make_private_folder(self._folder)
            with open_private(self.path / "lock", "ab") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    _log.info("%s: another process is fetching it; waiting for that", self.url)
                    fcntl.flock(lock, fcntl.LOCK_EX)
                # A volume may open it to others. It may belong to another user.
                with suppress(PermissionError):
                    self.path.chmod(0o700)
                self._load()
                try:
                    yield
                finally:
                    shutil.rmtree(self.partial, ignore_errors=True)
                    self._remove_outdated()
        except OSError as error:
            raise RemoteError(
                f"{self.url}: the cache {self.path} cannot be used: {error.strerror or error}; name a directory that this "
                "process may write by --model-cache"
            ) from None

    def _load(self) -> None:
        self.files = None
        try:
            record = json.loads((self.path / "record.json").read_text())
            # Older versions had the trees of a repository in one record.
            files = record["files"] if "files" in record else record["trees"]["model"]["files"]
            self.files = {name: CachedFile(**file) for name, file in files.items()}
        except FileNotFoundError:
            pass
        except (ValueError, KeyError, TypeError, AttributeError):
            _log.warning("%s: the record in %s is damaged; fetching again", self.url, self.path)

    def _remove_outdated(self) -> None:
        current = None if self.files is None else self.place(self.files)
        for path in list(self._folder.iterdir()):
            if path.suffix == ".lock" or path == current:
                continue
            with suppress(BlockingIOError), open_private(_lock_of(path), "ab") as lock:
                # No process can begin to use it, because the lock of the address is held.
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
                _lock_of(path).unlink()

    def save(self, files: Mapping[str, CachedFile]) -> None:
        """Make the tree of these files, which is complete, the current one."""
        self.files = files
        temporary = self.path / "record.json.new"
        with open_private(temporary, "w") as file:
            described = {name: asdict(each) for name, each in files.items()}
            json.dump({"url": str(self.url), "files": described}, file, indent=1)
        temporary.replace(self.path / "record.json")

    def forget(self) -> None:
        """Have no current tree any more."""
        self.files = None
        (self.path / "record.json").unlink(missing_ok=True)

    def place(self, files: Mapping[str, CachedFile]) -> Path:
        """Return where the tree of these files is."""
        lines = "".join(f"{file.sha256}  {name}\n" for name, file in sorted(files.items()))
        return self._folder / hashlib.sha256(lines.encode()).hexdigest()[:32]

    def tree(self) -> Tree:
        """Return the current tree."""
        assert self.files is not None
        return Tree(self.place(self.files))


class TreeBuilder:
    """Makes a new current tree of an entry. Call `add` for each file, then `finish`."""

    def __init__(self, entry: CacheEntry, fetch: Fetch) -> None:
        self._entry = entry
        self._fetch = fetch
        self._before = entry.files or {}
        self._folder_before = entry.place(self._before)
        self._files: dict[str, CachedFile] = {}
        self._unchanged: dict[str, Path] = {}
        shutil.rmtree(entry.partial, ignore_errors=True)

    def add(self, name: str, file: RemoteFile, pin: str | None = None) -> Path:
        """Obtain a file: from the last tree if it has this version. Return its path for now.

        RemoteError if it does not have the hash `pin`.
        """
        path, cached = self._folder_before / name, self._before.get(name)
        if cached is not None and cached.is_of(file) and cached.is_at(path):
            self._unchanged[name] = path
        else:
            path = self._entry.partial / name
            digest = self._fetch.download(file, path)
            cached = CachedFile(file.version, path.stat().st_size, digest)
        if pin not in (None, cached.sha256):
            raise RemoteError(
                f"{file.url} has sha256={cached.sha256}, but sha256={pin} is pinned: it is refused and removed; use the file that "
                "was meant, or pin the other hash if you trust it"
            )
        self._files[name] = cached
        return path

    def finish(self) -> None:
        """Make the tree of the files, and write it into the record."""
        entry, place = self._entry, self._entry.place(self._files)
        # Nothing is known of the files of another tree, whose record was lost.
        known = place == self._folder_before and place.is_dir()
        if not known or not all(file.is_at(place / name) for name, file in self._files.items()):
            make_private_folder(entry.partial)
            for name, path in self._unchanged.items():
                self._fetch.check_space(entry.url, place.parent, path.stat().st_size)
                make_private_folder((entry.partial / name).parent)
                # Not a link: onnx refuses weights that have several names.
                shutil.copy2(path, entry.partial / name)
            shutil.rmtree(place, ignore_errors=True)
            entry.partial.rename(place)
        if self._files != entry.files:
            entry.save(self._files)
