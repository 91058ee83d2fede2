"""Stores by their scheme: the hub by huggingface_hub, S3 and Google Cloud Storage by fsspec, and web servers."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from itertools import islice
from operator import methodcaller
from typing import Any

from tensorferry.server.models.remote.download import RemoteFile, Store
from tensorferry.server.models.remote.failures import (
    ChangedError,
    NoSuchBucket,
    RemoteError,
    has_no_credentials,
)
from tensorferry.server.models.remote.https import TIMEOUT_SECONDS, HttpsStore, require_https
from tensorferry.server.models.remote.url import RemoteUrl
from tensorferry.server.system.install_command import install_command

# Longest list of files of a repository.
MOST_FILES = 100_000
# Names of the loggers of the extras' packages, and of the packages that these use.
_LOGGERS = "aiobotocore aiohttp botocore fsspec gcsfs google httpcore httpcore2 httpx httpx2 huggingface_hub s3fs urllib3"
# Size of each request: large, because a request takes tens of milliseconds, but not so large that it takes minutes.
_CHUNK_BYTES = 8 << 20


class HubStore:
    """Hugging Face's hub at `endpoint`, by default that of HF_ENDPOINT, with the token of HF_TOKEN or of `hf auth login`.

    The commit of a file is part of its address, so a model and the files beside it are of the same commit.
    """

    def __init__(self, endpoint: str | None = None) -> None:
        self._endpoint = endpoint

    def describe(self, url: RemoteUrl) -> RemoteFile:
        """Return the state of a file in the commit that the revision names now."""
        hub = _package("huggingface_hub", "hf", url)
        token = hub.get_token() or False
        found = hub.get_hf_file_metadata(self._address(hub, url), token=token, timeout=TIMEOUT_SECONDS)
        if not found.commit_hash:
            raise RemoteError(
                f"{url}: the answer names no commit, so it is not from a hub; check HF_ENDPOINT, and proxies on the way"
            )
        # The hub identifies large files by their SHA-256.
        digest = found.etag if re.fullmatch("[0-9a-f]{64}", found.etag or "") else None
        return RemoteFile(replace(url, revision=found.commit_hash), found.etag, found.size, digest)

    def read(self, file: RemoteFile, output: io.FileIO) -> None:
        """Write the content of a file."""
        hub = _package("huggingface_hub", "hf", file.url)
        address = self._address(hub, file.url)

        def check(request: Any) -> None:
            require_https(file.url, address.partition(":")[0], request.url.scheme)

        # Not hf_hub_download: its partial files have no limits, and its cache has links, which ONNX refuses for weights.
        hub.utils.disable_progress_bars("huggingface_hub.http_get")
        headers = hub.utils.build_hf_headers(token=hub.get_token() or False)
        checks = hub.get_session().event_hooks["request"]
        checks.append(check)
        try:
            hub.file_download.http_get(address, output, headers=headers, expected_size=file.size)
        finally:
            checks.remove(check)

    def list(self, url: RemoteUrl) -> Mapping[str, RemoteFile]:
        """Return the files of a repository or of a directory in it, all of one commit."""
        api = _package("huggingface_hub", "hf", url).HfApi(self._endpoint)
        commit = api.repo_info(url.container, revision=url.revision or "main").sha
        tree = api.list_repo_tree(url.container, url.path or None, recursive=True, revision=commit)
        at_commit, root = replace(url, revision=commit), f"{url.path}/" if url.path else ""
        listed = {}
        # Each page names the next one, so that a list may have no end.
        for entry in islice(tree, MOST_FILES + 1):
            if hasattr(entry, "blob_id"):
                name = entry.path.removeprefix(root)
                digest = entry.lfs.sha256 if entry.lfs else None
                listed[name] = RemoteFile(at_commit.below(name), entry.blob_id, entry.size, digest)
        return listed

    def _address(self, hub: Any, url: RemoteUrl) -> str:
        revision = url.revision or "main"
        return str(hub.hf_hub_url(url.container, url.path, revision=revision, endpoint=self._endpoint))


class BucketStore:
    """Buckets of S3 or Google Cloud Storage, by file systems of fsspec.

    `open_filesystem` is called with two flags: no credentials are to be sent; an address names the version of an object.
    """

    def __init__(self, open_filesystem: Callable[[RemoteUrl, bool, bool], Any]) -> None:
        self._open_filesystem = open_filesystem
        self._filesystems: dict[tuple[bool, bool], Any] = {}
        self._anonymous = False

    def describe(self, url: RemoteUrl) -> RemoteFile:
        """Return the current state of an object, or of the version that the address names."""
        info = self._call(url, methodcaller("info", _path(url), **_version(url)))
        if info.get("type") == "directory":
            raise RemoteError(f"{url} is a prefix of objects, not an object; give the address of a file")
        return _described(url, info)

    def read(self, file: RemoteFile, output: io.FileIO) -> None:
        """Write the content of an object."""
        url, size = file.url, file.size or 0
        for start in range(0, size, _CHUNK_BYTES):
            part = {"start": start, "end": min(start + _CHUNK_BYTES, size), **_version(url)}
            output.write(self._call(url, methodcaller("cat_file", _path(url), **part)))
        # The parts may be of two versions.
        if self.describe(url).version != file.version:
            raise ChangedError(f"{url} has changed while it was downloaded; try again")

    def list(self, url: RemoteUrl) -> Mapping[str, RemoteFile]:
        """Return all objects below a prefix. An object whose name ends in a slash stands for an empty directory."""
        root = f"{_path(url)}/"
        found = self._call(url, methodcaller("find", _path(url), detail=True))
        if not found:
            # An empty list does not show whether the bucket exists.
            self._call(url, methodcaller("ls", url.container, detail=False))
        names = {path: path.removeprefix(root).lstrip("/") for path in found if path.startswith(root)}
        return {name: _described(url.below(name), found[path]) for path, name in names.items() if name}

    def _call(self, url: RemoteUrl, operation: Callable[[Any], Any]) -> Any:
        """Return the result of an operation. A public bucket needs no credentials."""
        try:
            return operation(self._filesystem(url))
        except FileNotFoundError:
            if self._has_bucket(url):
                raise
            raise NoSuchBucket from None
        except Exception as error:
            if self._anonymous or not has_no_credentials(error):
                raise
            without = error
        self._anonymous = True
        try:
            return self._call(url, operation)
        except PermissionError:
            self._anonymous = False
            raise without from None

    def _has_bucket(self, url: RemoteUrl) -> bool:
        try:
            self._filesystem(url).ls(url.container, detail=False)
        except Exception as error:
            # Objects may be read but not listed.
            return not isinstance(error, FileNotFoundError)
        return True

    def _filesystem(self, url: RemoteUrl) -> Any:
        flags = self._anonymous, url.version_id is not None
        if flags not in self._filesystems:
            self._filesystems[flags] = self._open_filesystem(url, *flags)
        return self._filesystems[flags]


# Without caches, which would hide changes.
_UNCACHED = {"use_listings_cache": False, "skip_instance_cache": True}


def _open_s3(url: RemoteUrl, anonymous: bool, versioned: bool) -> Any:
    client = {"connect_timeout": 10, "read_timeout": 30, "retries": {"max_attempts": 2}}
    made = _package("s3fs", "s3", url).S3FileSystem
    return made(anon=anonymous, version_aware=versioned, config_kwargs=client, **_UNCACHED)


def _open_gcs(url: RemoteUrl, anonymous: bool, versioned: bool) -> Any:
    # Not that of gcsfs itself, which asks by gRPC what kind of bucket it is, also where only HTTP is answered.
    return _package("gcsfs.core", "gcs", url).GCSFileSystem(**_UNCACHED)


def _path(url: RemoteUrl) -> str:
    return f"{url.container}/{url.path}".rstrip("/")


def _version(url: RemoteUrl) -> dict[str, Any]:
    return {} if url.version_id is None else {"version_id": url.version_id}


def _described(url: RemoteUrl, info: Mapping[str, Any]) -> RemoteFile:
    version = info.get("ETag") or info.get("etag") or info.get("generation")
    return RemoteFile(url, None if version is None else str(version), int(info.get("size") or 0))


def _package(name: str, extra: str, url: RemoteUrl) -> Any:
    """Return a package of an extra. RemoteError, with the command that installs it, if it is missing.

    Its own log is switched off: failures are raised, and lines can have tokens or presigned addresses.
    """
    try:
        module = import_module(name)
    except ModuleNotFoundError as error:
        raise RemoteError(
            f"{url}: the package {error.name} is missing, which {url.scheme}:// needs: {install_command(extra)}"
        ) from None
    # After the import, which can set levels.
    for logger in _LOGGERS.split():
        logging.getLogger(logger).setLevel(logging.CRITICAL + 1)
    return module


StoreOf = Callable[[RemoteUrl], Store]


def stores(*, allow_http: bool) -> StoreOf:
    """Return a function that returns the store of an address, made once for each scheme.

    The function raises RemoteError for http:// unless that is allowed. Only for one thread at a time.
    """
    web = HttpsStore()
    made: dict[str, Store] = {
        "hf": HubStore(), "s3": BucketStore(_open_s3), "gs": BucketStore(_open_gcs), "https": web, "http": web
    }  # fmt: skip

    def store_of(url: RemoteUrl) -> Store:
        if url.scheme == "http" and not allow_http:
            raise RemoteError(
                f"{url} is not encrypted, so the network can read and replace the model; give https://, or --allow-http if the "
                "network is trusted"
            )
        return made[url.scheme]

    return store_of
