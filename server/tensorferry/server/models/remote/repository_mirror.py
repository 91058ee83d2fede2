"""Model repositories elsewhere, as directories of this machine that have Triton's layout.

The directory of a mirror belongs to one process and has links to trees of the cache, which other processes use, too. A
model's files are fetched when they are asked for, each version as one tree.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from tensorferry.server.models.remote.cache import CacheEntry, Tree, TreeBuilder
from tensorferry.server.models.remote.download import Fetch, RemoteFile
from tensorferry.server.models.remote.failures import ChangedError, RemoteError, UnreachableError
from tensorferry.server.models.remote.stores import MOST_FILES, StoreOf
from tensorferry.server.models.remote.url import RemoteUrl, is_safe
from tensorferry.server.names import VERSION
from tensorferry.server.system.scratch_directory import ScratchDirectory

_log = logging.getLogger("tensorferry.server")

# Suffixes of files that run in the server.
_CODE_SUFFIXES = (".py", ".pyc", ".pyw", ".so", ".dll")


class RepositoryMirror:
    """A repository elsewhere. `root` is its directory on this machine, which is removed with this object.

    Call `refresh` before anything else. Only for one thread at a time; other threads may read the directory.
    """

    def __init__(self, url: RemoteUrl, cache: Path, store_of: StoreOf, *, allow_code: bool) -> None:
        self.url = url
        self.allow_code = allow_code
        # Messages that name a file of the mirror say where it is from.
        self._scratch = ScratchDirectory()
        self.root = self._scratch.path / f"{url.scheme}:" / url.container / url.path
        self._cached = cache / url.key / "parts"
        self._store_of = store_of
        # The files of each part: "NAME" is what a model has outside of its versions, "NAME/VERSION" a version.
        self._parts: dict[str, dict[str, RemoteFile]] = {}
        # The trees that the directory links to, which are kept by that.
        self._linked: dict[str, Tree] = {}

    def refresh(self) -> None:
        """List the repository. New models and versions appear in the directory, without their files; others go.

        RemoteError if it cannot be listed. If the host cannot be reached, a warning is logged; the last list of this process
        is used, else what is in the cache.
        """
        try:
            self._parts = _parts(self.url, Fetch(self._store_of(self.url)).list(self.url))
        except UnreachableError as error:
            self._parts = self._parts or self._parts_in_cache()
            if not self._parts:
                raise
            _log.warning("%s; the copy in the cache is used, which may be outdated", error)
            self._show()
        else:
            self._show()
            for part, entry in self._entries():
                if part not in self._parts:
                    with entry.locked():
                        entry.forget()

    def _entry(self, part: str) -> CacheEntry:
        return CacheEntry(self._cached / part, self.url.below(part))

    def _entries(self) -> Iterator[tuple[str, CacheEntry]]:
        """Yield each part of the cache that has trees, and its entry."""
        for trees in (*self._cached.glob("*/trees"), *self._cached.glob("*/[1-9]*/trees")):
            part = trees.parent.relative_to(self._cached).as_posix()
            if any(trees.iterdir()):
                yield part, self._entry(part)

    def _parts_in_cache(self) -> dict[str, dict[str, RemoteFile]]:
        parts = {}
        for part, entry in self._entries():
            with entry.locked():
                if entry.files is not None:
                    parts[part] = {
                        name: RemoteFile(self.url.below(f"{part}/{name}"), file.version, file.size)
                        for name, file in entry.files.items()
                    }
        return parts

    def _show(self) -> None:
        """Make the directories of the models and versions of the list, and remove others."""
        self.root.mkdir(parents=True, exist_ok=True)
        for part in self._parts:
            if not (self.root / part).is_symlink():
                (self.root / part).mkdir(parents=True, exist_ok=True)
        for model in list(self.root.iterdir()):
            if model.name not in self._parts:
                shutil.rmtree(model)
                continue
            # Version directories only; what else the model has changes when it is fetched.
            for entry in list(model.iterdir()):
                if VERSION.fullmatch(entry.name) and f"{model.name}/{entry.name}" not in self._parts:
                    _remove(entry)
        self._linked = {part: tree for part, tree in self._linked.items() if part in self._parts}

    def fetch(self, part: str) -> None:
        """Fetch a version, NAME/VERSION, or what a model has outside of its versions, NAME. RemoteError."""
        if part not in self._parts:
            return
        files, cached = self._allowed(part), self._entry(part)
        with cached.locked():
            builder = TreeBuilder(cached, Fetch(self._store_of(self.url)))
            try:
                for name, file in files.items():
                    builder.add(name, file)
            except ChangedError as error:
                raise RemoteError(f"{error}; with --model-control poll it is fetched again") from None
            builder.finish()
            tree = cached.tree()
        if "/" in part:
            _link(tree.path, self.root / part)
        else:
            present = {entry.name: entry for entry in tree.path.iterdir()}
            for entry in list((self.root / part).iterdir()):
                if entry.name not in present and f"{part}/{entry.name}" not in self._parts:
                    _remove(entry)
            for entry in present.values():
                _link(entry, self.root / part / entry.name)
        self._linked[part] = tree

    def _allowed(self, part: str) -> Mapping[str, RemoteFile]:
        """Return the files of a part that may be fetched. RemoteError if they are all code, which is not allowed."""
        files = self._parts[part]
        code = [name for name in files if name.lower().endswith(_CODE_SUFFIXES) and not self.allow_code]
        if code and len(code) == len(files) and "/" in part:
            raise RemoteError(
                f"{self.url}/{part}/{code[0]} is code, which would run in the server: it is not fetched; if everyone who can "
                "write to the repository may run code here, give --allow-remote-code"
            )
        return {name: file for name, file in files.items() if name not in code}


def _parts(url: RemoteUrl, files: Mapping[str, RemoteFile]) -> dict[str, dict[str, RemoteFile]]:
    """Return the files by part, each by its path in the part. RemoteError if there are too many."""
    if len(files) > MOST_FILES:
        raise RemoteError(
            f"{url} lists more than {MOST_FILES:,} files and directories; give the address of a directory with models only"
        )
    parts: dict[str, dict[str, RemoteFile]] = {}
    for path, file in files.items():
        if not is_safe(path):
            _log.warning("%s names %r, which is not below its directory; it is not fetched", url, path)
            continue
        model, slash, rest = path.partition("/")
        if not slash:
            # A file beside the models, such as a README.
            continue
        version, slash, name = rest.partition("/")
        part, name = (f"{model}/{version}", name) if slash and VERSION.fullmatch(version) else (model, rest)
        parts.setdefault(model, {})
        of_part = parts.setdefault(part, {})
        if name and not name.endswith("/"):
            of_part[name] = file
    return parts


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
