"""Single models from elsewhere: an ONNX file, and the files beside it that have its weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from tensorferry.server.remote.cache import CacheEntry, Record, Tree
from tensorferry.server.remote.download import Downloader, sha256_of
from tensorferry.server.remote.failures import ChangedError, RemoteError, UnreachableError
from tensorferry.server.remote.fetching import StoreOf, TreeBuilder, require_safe
from tensorferry.server.remote.stores import RemoteFile, Store
from tensorferry.server.remote.time_limits import TimedStore
from tensorferry.server.remote.url import RemoteUrl

_log = logging.getLogger("tensorferry.server")

_PART = "model"
# A file that changes during each of these downloads is given up.
_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class FetchedModel:
    """A model's file in the cache. It stays at least as long as `tree`."""

    path: Path
    tree: Tree


class ModelFiles:
    """Fetches models into the directory `cache`. Processes and threads can share it.

    `store_of` returns the store of an address. `companions` returns the names of the files that an ONNX file refers to.
    """

    def __init__(
        self,
        cache: Path,
        store_of: StoreOf,
        companions: Callable[[Path], Collection[str]],
        downloader: Downloader | None = None,
    ) -> None:
        self._cache = cache
        self._store_of = store_of
        self._companions = companions
        self._downloader = downloader or Downloader()

    def fetch(self, url: RemoteUrl) -> FetchedModel:
        """Return a model from the cache, after it was fetched if it is not there or has changed. RemoteError.

        If the address names one version, or a hash is pinned, the host is not asked about a model in the cache, whose hash
        is checked. If the host cannot be reached, the last copy is used, and a warning logged.
        """
        entry = CacheEntry(self._cache, url)
        with entry.locked():
            record = entry.record()
            cached = self._cached(entry, record)
            if cached is not None and (url.immutable or url.pins):
                _log.info("%s: the copy in the cache is used", url)
                return self._model(url, cached)
            try:
                tree = self._current(entry, record)
            except UnreachableError as error:
                if cached is None:
                    raise
                _log.warning("%s; the copy in the cache is used, which may be outdated", error)
                return self._model(url, cached)
            # This process would keep it.
            del cached
            entry.remove_outdated(record)
            return self._model(url, tree)

    def _model(self, url: RemoteUrl, tree: Tree) -> FetchedModel:
        return FetchedModel(tree.path / url.file_name, tree)

    def _cached(self, entry: CacheEntry, record: Record) -> Tree | None:
        """Return the tree in the cache, if it is complete and has the pinned hashes."""
        known = record.trees.get(_PART)
        tree = None if known is None else entry.tree(known.digest)
        if known is None or tree is None:
            return None
        url = entry.url
        for name, file in known.files.items():
            path, pin = tree.path / name, url.pin("" if name == url.file_name else name)
            complete = path.is_file() and path.stat().st_size == file.size
            if not complete or ((url.pins or url.immutable) and sha256_of(path) != file.sha256):
                _log.warning("%s: %s in the cache is damaged; it is fetched again", url, path)
                entry.remove(known.digest)
                return None
            if url.pins and file.sha256 != pin:
                # Another hash was pinned when it was fetched, or none.
                return None
        return tree

    def _current(self, entry: CacheEntry, record: Record) -> Tree:
        store = TimedStore(self._store_of(entry.url))
        for _ in range(_ATTEMPTS - 1):
            try:
                return self._described(store, entry, record)
            except ChangedError as error:
                _log.warning("%s; it is fetched again", error)
        return self._described(store, entry, record)

    def _described(self, store: Store, entry: CacheEntry, record: Record) -> Tree:
        """Return the tree of the model as its host has it now."""
        url = entry.url
        builder = TreeBuilder(entry, record, _PART, store, self._downloader)
        main = store.describe(url)
        if (tree := self._unchanged(store, builder, main, record)) is not None:
            return tree
        path = builder.add(url.file_name, main, url.pin())
        names = sorted({*self._companions(path)} - {url.file_name})
        require_safe(url, names)
        for name in names:
            beside = store.describe(main.url.beside(name))
            pin = url.pin(name)
            file = builder.add(name, beside, pin)
            if url.pins and pin is None:
                digest = sha256_of(file)
                file.unlink()
                raise RemoteError(
                    f"{url} is pinned by its hash, but its weights in {name} are not: they are refused and removed; add "
                    f"&{name}={digest} if you trust them"
                )
        return builder.finish()

    def _unchanged(self, store: Store, builder: TreeBuilder, main: RemoteFile, record: Record) -> Tree | None:
        """Return the tree in the cache, if neither the model nor the files beside it have changed."""
        url = main.url
        known = record.trees.get(_PART)
        first = None if known is None else known.files.get(url.file_name)
        if known is None or first is None or main.version is None or first.version != main.version:
            return None
        beside = {name: store.describe(url.beside(name)) for name in known.files if name != url.file_name}
        tree = builder.unchanged({url.file_name: main, **beside})
        if tree is None or (
            url.pins
            and any(
                file.sha256 != url.pin("" if name == url.file_name else name)
                for name, file in known.files.items()
            )
        ):
            return None
        _log.info("%s has not changed; the copy in the cache is used", url)
        return tree
