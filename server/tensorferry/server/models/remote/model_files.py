"""Single models from elsewhere: an ONNX file, and the files beside it that have its weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from tensorferry.server.models.remote.cache import CacheEntry, Tree, TreeBuilder
from tensorferry.server.models.remote.download import LIMITS, Fetch, Limits, sha256_of
from tensorferry.server.models.remote.failures import ChangedError, RemoteError, UnreachableError
from tensorferry.server.models.remote.stores import StoreOf
from tensorferry.server.models.remote.url import RemoteUrl, is_safe

_log = logging.getLogger("tensorferry.server")

# A file that changes during each of these downloads is given up.
_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class FetchedModel:
    """A model's file in the cache. It stays at least as long as `tree`."""

    path: Path
    tree: Tree


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Fetches models into the directory `cache`. Processes and threads can share it.

    `store_of` returns the store of an address. `companions` returns the names of the files that an ONNX file refers to.
    """

    cache: Path
    store_of: StoreOf
    companions: Callable[[Path], Collection[str]]
    limits: Limits = LIMITS

    def fetch(self, url: RemoteUrl) -> FetchedModel:
        """Return a model from the cache, after it was fetched if it is not there or has changed. RemoteError.

        If the address names one version, or a hash is pinned, the host is not asked about a model in the cache, whose hash
        is checked. If the host cannot be reached, the last copy is used, and a warning logged.
        """
        entry = CacheEntry(self.cache / url.key, url)
        with entry.locked():
            cached = self._is_cached(entry)
            before = entry.files
            if not (cached and (url.immutable or url.pins)):
                try:
                    self._update(entry)
                except UnreachableError as error:
                    if not cached:
                        raise
                    _log.warning("%s; the copy in the cache is used, which may be outdated", error)
            if cached and entry.files == before:
                _log.info("%s: the copy in the cache is used", url)
            tree = entry.tree()
            return FetchedModel(tree.path / url.file_name, tree)

    def _is_cached(self, entry: CacheEntry) -> bool:
        """Return whether the tree in the cache is complete and has the pinned hashes. A damaged one is forgotten."""
        url, known = entry.url, entry.files
        if known is None:
            return False
        for name, file in known.items():
            path = entry.place(known) / name
            if not file.is_at(path) or ((url.pins or url.immutable) and sha256_of(path) != file.sha256):
                _log.warning("%s: %s in the cache is damaged; it is fetched again", url, path)
                entry.files = None
                return False
        # Another hash may have been pinned when it was fetched, or none.
        return not url.pins or all(file.sha256 == url.pin(name) for name, file in known.items())

    def _update(self, entry: CacheEntry) -> None:
        """Make the tree of the model as its host has it now."""
        fetch = Fetch(self.store_of(entry.url), self.limits)
        for _ in range(_ATTEMPTS - 1):
            try:
                return self._build(entry, fetch)
            except ChangedError as error:
                _log.warning("%s; it is fetched again", error)
        return self._build(entry, fetch)

    def _build(self, entry: CacheEntry, fetch: Fetch) -> None:
        url = entry.url
        builder = TreeBuilder(entry, fetch)
        main = fetch.describe(url)
        path = builder.add(url.file_name, main, url.pin(url.file_name))
        names = sorted({*self.companions(path)} - {url.file_name})
        if unsafe := [name for name in names if not is_safe(name)]:
            raise RemoteError(
                f"{url} names {unsafe[0]!r}, which is not below its directory; such a file is not fetched"
            )
        for name in names:
            file = builder.add(name, fetch.describe(main.url.beside(name)), url.pin(name))
            if url.pins and url.pin(name) is None:
                raise RemoteError(
                    f"{url} is pinned by its hash, but its weights in {name} are not: they are refused and removed; add "
                    f"&{name}={sha256_of(file)} if you trust them"
                )
        builder.finish()
