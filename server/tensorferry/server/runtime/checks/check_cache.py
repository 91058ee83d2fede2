"""Cache of what checks found about model files, in the user's cache directory."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tensorferry.server.runtime.files.file_record import FileRecord
from tensorferry.server.runtime.ort import onnxruntime
from tensorferry.server.runtime.ort_options import OrtOptions
from tensorferry.server.runtime.provider_packages import is_package
from tensorferry.server.system.private_files import make_private_folder
from tensorferry.server.system.threads import ThreadKind, new_thread

_log = logging.getLogger("tensorferry.server")

# To be increased when the checks or the format of the cache change.
_VERSION = 12


def cache_directory() -> Path | None:
    """Return `$XDG_CACHE_HOME/tensorferry`, by default `~/.cache/tensorferry`; None if there is no home directory."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(given):
        return Path(given) / "tensorferry"
    try:
        return Path.home() / ".cache" / "tensorferry"
    except RuntimeError:
        return None


def digest_of(files: Iterable[Path], conditions: str) -> str:
    """Return a digest of files and of the conditions of the result."""
    digest = hashlib.sha256(conditions.encode())
    for each in files:
        with each.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _version_of(package: str) -> str | None:
    """Return the version of a package; None if it is missing, which the session reports."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


class CheckCache:
    """Results of the checks of one model file, with a session's options on some devices. Thread-safe.

    Make it before the file is read: a result is neither stored nor returned if a file has changed since. `files` is the
    record of that, with the libraries of custom operators. The name of each entry is a digest of the files, the versions, and
    the conditions of the result, so an entry is never out of date. An unusable directory disables the cache.
    """

    def __init__(self, path: Path, options: OrtOptions, devices: Iterable[str]) -> None:
        self._directory = cache_directory()
        self.devices = sorted(set(devices))
        # Threads change no result.
        options = replace(options, processes=1, intra_op_threads=0)
        packages = [provider.name for provider in (*options.cpu, *options.gpu) if is_package(provider.name)]
        versions = [_version_of(package) for package in ("tensorferry", *packages)]
        self._conditions = repr((_VERSION, versions, onnxruntime.__version__, options, self.devices))
        self.files = FileRecord(path, [library.path for library in options.op_libraries])
        self._digest: Future[str] = Future()
        if self._directory is None:
            self._digest.set_result("")
        else:
            # Beside the session's creation, because reading the weights of a large model takes a second.
            new_thread("check-cache", self._compute_digest, ThreadKind.EXPENDABLE).start()

    def _compute_digest(self) -> None:
        digest = ""
        # The session reports a missing file.
        with suppress(OSError):
            digest = digest_of(self.files.paths, self._conditions)
        self._digest.set_result(digest)

    def _entry(self, kind: str, conditions: object) -> Path | None:
        digest = self._digest.result()
        if self._directory is None or not digest or self.files.has_changed():
            return None
        name = hashlib.sha256(repr((digest, conditions)).encode()).hexdigest()
        return self._directory / kind / f"{name}.json"

    def get(self, kind: str, conditions: object) -> Any:
        """Return the result that `put` stored under the same conditions; None if there is none."""
        entry = self._entry(kind, conditions)
        try:
            return None if entry is None else json.loads(entry.read_bytes())
        except (OSError, ValueError):
            return None

    def put(self, kind: str, conditions: object, result: Any) -> None:
        """Store a result of a kind of check atomically."""
        entry = self._entry(kind, conditions)
        if entry is None:
            return
        try:
            make_private_folder(entry.parent)
            handle, name = tempfile.mkstemp(dir=entry.parent, suffix=".part")
            try:
                with os.fdopen(handle, "w") as file:
                    json.dump(result, file)
                os.replace(name, entry)
            except BaseException:
                os.unlink(name)
                raise
        except OSError as error:
            _log.debug("results of checks cannot be stored in %s: %s", entry.parent, error)
