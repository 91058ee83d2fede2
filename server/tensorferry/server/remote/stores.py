"""What the cache needs of a host: the state of a file, its bytes, and a list of files."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

from tensorferry.server.remote.failures import RemoteError
from tensorferry.server.remote.url import RemoteUrl

# Longest list of files of a repository.
MOST_FILES = 100_000
# Of the packages of the extras, and of those that they use.
_LOGGERS = (
    "aiobotocore",
    "aiohttp",
    "botocore",
    "fsspec",
    "gcsfs",
    "google",
    "httpcore",
    "httpcore2",
    "httpx",
    "httpx2",
    "huggingface_hub",
    "s3fs",
    "urllib3",
)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file as its host describes it.

    `version` differs if the content does: an ETag, a commit, or a time; None if the host gives nothing like it. `size` is
    in bytes, None if unknown. `sha256` is the hash that the host states, None if it states none.
    """

    url: RemoteUrl
    version: str | None
    size: int | None
    sha256: str | None = None


class Store(Protocol):
    """A kind of host. Every method raises RemoteError, or UnreachableError if the host does not answer."""

    def describe(self, url: RemoteUrl) -> RemoteFile:
        """Return the current state of a file."""
        ...

    def read(self, file: RemoteFile, offset: int) -> tuple[int, Iterator[bytes]]:
        """Return the bytes from `offset` on, and where they begin: at 0 if the host cannot begin at `offset`.

        ChangedError if the file is no longer as described.
        """
        ...

    def list(self, url: RemoteUrl) -> Mapping[str, RemoteFile]:
        """Return all files of a directory and below, by their paths in it; a list above MOST_FILES need not be complete."""
        ...


def package(name: str, extra: str, url: RemoteUrl) -> Any:
    """Return a package of an extra. RemoteError, with the command that installs it, if it is missing.

    Its own log is switched off: failures are raised, and lines can have tokens or presigned addresses.
    """
    try:
        module = import_module(name)
    except ModuleNotFoundError as error:
        raise RemoteError(
            f"{url}: the package {error.name} is missing, which {url.scheme}:// needs: pip install 'tensorferry[{extra}]'"
        ) from None
    # After the import, which can set levels.
    for logger in _LOGGERS:
        logging.getLogger(logger).setLevel(logging.CRITICAL + 1)
    return module
