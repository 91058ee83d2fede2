"""Model repositories elsewhere, as directories of this machine that have Triton's layout.

The directory of a mirror belongs to one process and has links to trees of the cache, which other processes use, too. A
model's files are fetched when they are asked for, each version as one tree.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from tensorferry.server.remote.cache import CacheEntry, Tree
from tensorferry.server.remote.download import Downloader
from tensorferry.server.remote.failures import ChangedError, RemoteError, UnreachableError
from tensorferry.server.remote.fetching import StoreOf, TreeBuilder, is_safe
from tensorferry.server.remote.stores import MOST_FILES, RemoteFile
from tensorferry.server.remote.time_limits import TimedStore
from tensorferry.server.remote.url import RemoteUrl
from tensorferry.server.scratch_directory import ScratchDirectory

_log = logging.getLogger("tensorferry.server")

# Of files that run in the server.
_CODE_SUFFIXES = frozenset((".py", ".pyc", ".pyw", ".so", ".dll"))


class RepositoryMirror:
    """A repository elsewhere. `root` is its directory on this machine, which is removed with this object.

    Call `refresh` before anything else. Only for one thread at a time; other threads may read the directory.
    """

    def __init__(
        self,
        url: RemoteUrl,
        cache: Path,
        store_of: StoreOf,
        *,
        allow_code: bool,
        downloader: Downloader | None = None,
    ) -> None:
        self.url = url
        self.allow_code = allow_code
        # Messages that name a file of the mirror say where it is from.
        self._scratch = ScratchDirectory()
        self.root = self._scratch.path / f"{url.scheme}:" / url.container / url.path
        self._entry = CacheEntry(cache, url)
        self._store_of = store_of
        self._downloader = downloader or Downloader()
        # The files of each part: "NAME" is what a model has outside of its versions, "NAME/VERSION" a version.
        self._parts: dict[str, dict[str, RemoteFile]] = {}
        # The trees that the directory links to, which are kept by that.
        self._linked: dict[str, Tree] = {}

    def refresh(self) -> None:
        """List the repository. New models and versions appear in the directory, without their files; others go.

        RemoteError if it cannot be listed; if the host cannot be reached, the last list is used, and a warning logged.
        """
        with self._entry.locked():
            record = self._entry.record()
            try:
                files = TimedStore(self._store_of(self.url)).list(self.url)
            except UnreachableError as error:
                if not record.listing:
                    raise
                _log.warning("%s; the copy in the cache is used, which may be outdated", error)
                files = {
                    name: RemoteFile(self.url.below(name), version, size)
                    for name, (version, size) in record.listing.items()
                }
            if len(files) > MOST_FILES:
                raise RemoteError(
                    f"{self.url} lists more than {MOST_FILES:,} files and directories; give the address of a directory with "
                    "models only"
                )
            self._parts = _parts(self.url, files)
            record.listing = {name: (file.version, file.size) for name, file in files.items()}
            for part in record.trees.keys() - self._parts.keys():
                del record.trees[part]
            self._entry.write(record)
            self._entry.remove_outdated(record)
        self._show()

    def _show(self) -> None:
        """Make the directories of the models and versions of the list, and remove others."""
        self.root.mkdir(parents=True, exist_ok=True)
        for part in self._parts:
            path = self.root / part
            if not path.is_symlink():
                path.mkdir(parents=True, exist_ok=True)
        for model in list(self.root.iterdir()):
            if model.name not in self._parts:
                shutil.rmtree(model)
                continue
            for entry in list(model.iterdir()):
                part = f"{model.name}/{entry.name}"
                # Version directories only; what else the model has changes when it is fetched.
                if part not in self._parts and _is_version(entry.name):
                    _remove(entry)
        self._linked = {part: tree for part, tree in self._linked.items() if part in self._parts}

    def fetch_model(self, name: str) -> None:
        """Fetch what a model has outside of its versions, such as its config.pbtxt. RemoteError."""
        if name not in self._parts:
            return
        tree = self._fetch(name)
        present = {entry.name for entry in tree.path.iterdir()}
        directory = self.root / name
        for entry in list(directory.iterdir()):
            if entry.name not in present and f"{name}/{entry.name}" not in self._parts:
                _remove(entry)
        for entry in tree.path.iterdir():
            _link(entry, directory / entry.name)
        self._linked[name] = tree

    def fetch_version(self, name: str, version: int) -> None:
        """Fetch the files of a model's version. RemoteError."""
        part = f"{name}/{version}"
        if part not in self._parts:
            return
        tree = self._fetch(part)
        _link(tree.path, self.root / part)
        self._linked[part] = tree

    def _fetch(self, part: str) -> Tree:
        """Return the tree of a part, after what is not in the cache was fetched."""
        files = self._allowed(part)
        with self._entry.locked():
            record = self._entry.record()
            store = TimedStore(self._store_of(self.url))
            builder = TreeBuilder(self._entry, record, part, store, self._downloader)
            if (tree := builder.unchanged(files)) is not None:
                return tree
            try:
                for name, file in files.items():
                    builder.add(name, file)
            except ChangedError as error:
                raise RemoteError(f"{error}; with --model-control poll it is fetched again") from None
            return builder.finish()

    def _allowed(self, part: str) -> Mapping[str, RemoteFile]:
        """Return the files of a part that may be fetched. RemoteError if they are all code, which is not allowed."""
        files = self._parts[part]
        if self.allow_code:
            return files
        code = [name for name in files if PurePosixPath(name).suffix.lower() in _CODE_SUFFIXES]
        if code and len(code) == len(files) and "/" in part:
            raise RemoteError(
                f"{self.url}/{part}/{code[0]} is code, which would run in the server: it is not fetched; if everyone who can "
                "write to the repository may run code here, give --allow-remote-code"
            )
        return {name: file for name, file in files.items() if name not in code}


def _parts(url: RemoteUrl, files: Mapping[str, RemoteFile]) -> dict[str, dict[str, RemoteFile]]:
    """Return the files by part, each by its path in the part."""
    parts: dict[str, dict[str, RemoteFile]] = {}
    for path, file in files.items():
        if not is_safe(path):
            _log.warning("%s names %r, which is not below its directory; it is not fetched", url, path)
            continue
        model, _, rest = path.partition("/")
        if not rest and not path.endswith("/"):
            # A file beside the models, such as a README.
            continue
        of_model = parts.setdefault(model, {})
        version, slash, name = rest.partition("/")
        if slash and _is_version(version):
            of_version = parts.setdefault(f"{model}/{version}", {})
            if name and not name.endswith("/"):
                of_version[name] = file
        elif rest and not rest.endswith("/"):
            of_model[rest] = file
    return parts


def _is_version(name: str) -> bool:
    return name.isascii() and name.isdecimal() and name[0] != "0"


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _link(target: Path, path: Path) -> None:
    """Make or replace a link at once, so that other threads see the old or the new one."""
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    elif path.is_symlink() and os.readlink(path) == str(target):
        return
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    new.symlink_to(target.absolute())
    new.replace(path)
