"""Stores by their scheme: the hub by huggingface_hub, S3 and Google Cloud Storage by fsspec, web servers by urllib."""

from __future__ import annotations

import io
import logging
import re
import urllib.request
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from http.client import HTTPResponse
from importlib import import_module
from itertools import islice
from operator import methodcaller
from typing import IO, Any, cast
from urllib.parse import quote, unquote, urlsplit

from tensorferry.server.models.remote.download import RemoteFile, Store
from tensorferry.server.models.remote.failures import ChangedError, NoSuchBucket, RemoteError
from tensorferry.server.models.remote.url import RemoteUrl

# Longest list of files of a repository.
MOST_FILES = 100_000
# Names of the loggers of the extras' packages, and of the packages that these use.
_LOGGERS = "aiobotocore aiohttp botocore fsspec gcsfs google httpcore httpcore2 httpx httpx2 huggingface_hub s3fs urllib3"
# Size of each request: large, because a request takes tens of milliseconds, but not so large that it takes minutes.
_CHUNK_BYTES = 8 << 20
# Longest wait for a connection, and for the next bytes.
_TIMEOUT_SECONDS = 30.0
# Characters that stay as written in a path: those with a meaning there, and "%" of what is encoded.
_IN_PATHS = "/%:@!$&'()*+,;=~-._"


class HubStore:
    """Hugging Face's hub at `endpoint`, by default that of HF_ENDPOINT, with the token of HF_TOKEN or of `hf auth login`.

    The commit of a file is part of its address, so a model and the files beside it are of the same commit.
    """

    def __init__(self, endpoint: str | None = None) -> None:
        self._endpoint = endpoint

    def describe(self, url: RemoteUrl) -> RemoteFile:
        """Return the state of a file in the commit that the revision names now."""
        hub = _package("huggingface_hub")
        token = hub.get_token() or False
        found = hub.get_hf_file_metadata(self._address(url), token=token, timeout=_TIMEOUT_SECONDS)
        if not found.commit_hash:
            raise RemoteError(
                f"{url}: the answer names no commit, so it is not from a hub; check HF_ENDPOINT, and proxies on the way"
            )
        # The hub identifies large files by their SHA-256.
        digest = found.etag if re.fullmatch("[0-9a-f]{64}", found.etag or "") else None
        return RemoteFile(replace(url, revision=found.commit_hash), found.etag, found.size, digest)

    def read(self, file: RemoteFile, output: io.FileIO) -> None:
        """Write the content of a file."""
        hub, address = _package("huggingface_hub"), self._address(file.url)

        def check(request: Any) -> None:
            _require_https(file.url, address.partition(":")[0], request.url.scheme)

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
        api = _package("huggingface_hub").HfApi(self._endpoint)
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

    def _address(self, url: RemoteUrl) -> str:
        hub, revision = _package("huggingface_hub"), url.revision or "main"
        return str(hub.hf_hub_url(url.container, url.path, revision=revision, endpoint=self._endpoint))


class BucketStore:
    """Buckets of S3 or Google Cloud Storage, by file systems of fsspec.

    `open_filesystem` is called with whether addresses name the version of an object.
    """

    def __init__(self, open_filesystem: Callable[[bool], Any]) -> None:
        self._filesystem = cache(open_filesystem)

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
        """Return the result of an operation. NoSuchBucket if nothing is there, because the bucket is not."""
        filesystem = self._filesystem(url.version_id is not None)
        try:
            return operation(filesystem)
        except FileNotFoundError as missing:
            try:
                filesystem.ls(url.container, detail=False)
            except FileNotFoundError:
                raise NoSuchBucket from None
            except Exception:
                # Objects may be read but not listed.
                raise missing from None
            raise


# Without caches, which would hide changes.
_UNCACHED = {"use_listings_cache": False, "skip_instance_cache": True}


def _open_s3(versioned: bool) -> Any:
    client = {"connect_timeout": 10, "read_timeout": 30, "retries": {"max_attempts": 2}}
    made = _package("s3fs").S3FileSystem
    # A public object needs no credentials.
    of_fsspec = _package("fsspec.config").conf.get("s3", {})
    known = "key" in of_fsspec or "profile" in of_fsspec
    anonymous = not known and _package("botocore.session").Session().get_credentials() is None
    return made(anon=anonymous, version_aware=versioned, config_kwargs=client, **_UNCACHED)


def _open_gcs(versioned: bool) -> Any:
    # Not that of gcsfs itself, which asks by gRPC what kind of bucket it is, also where only HTTP is answered.
    return _package("gcsfs.core").GCSFileSystem(**_UNCACHED)


def _path(url: RemoteUrl) -> str:
    return f"{url.container}/{url.path}".rstrip("/")


def _version(url: RemoteUrl) -> dict[str, Any]:
    return {} if url.version_id is None else {"version_id": url.version_id}


def _described(url: RemoteUrl, info: Mapping[str, Any]) -> RemoteFile:
    version = info.get("ETag") or info.get("etag") or info.get("generation")
    return RemoteFile(url, None if version is None else str(version), int(info.get("size") or 0))


def _package(name: str) -> Any:
    """Return a package of an extra, with its log switched off: failures are raised, and lines can have tokens or presigned
    addresses.
    """
    module = import_module(name)
    # After the import, which can set levels.
    for logger in _LOGGERS.split():
        logging.getLogger(logger).setLevel(logging.CRITICAL + 1)
    return module


class HttpsStore(Store):
    """Web servers, which have no lists of files."""

    def describe(self, url: RemoteUrl) -> RemoteFile:
        """Return the current state of a file. It asks for the first byte, because presigned addresses refuse HEAD."""
        with _open(url, Range="bytes=0-0") as response:
            headers = response.headers
            size = (headers["Content-Range"] or headers["Content-Length"] or "").rpartition("/")[2]
            # A longer number is no size of a file.
            known = int(size) if re.fullmatch("[0-9]{1,18}", size) else None
            return RemoteFile(url, _version_in(response), known)

    def read(self, file: RemoteFile, output: io.FileIO) -> None:
        """Write the content of a file."""
        with _open(file.url) as response:
            if file.version not in (None, _version_in(response)):
                raise ChangedError(f"{file.url} has changed while it was downloaded; try again")
            # What has arrived, so that a slow host is noticed before the chunk is full.
            while chunk := response.read1(1 << 20):
                output.write(chunk)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, but not from https to http."""

    def __init__(self, url: RemoteUrl) -> None:
        self._url = url

    def redirect_request(
        self, request: urllib.request.Request, response: IO[bytes], *rest: Any
    ) -> urllib.request.Request | None:
        # Its body is not needed. urllib would read it as a whole.
        response.close()
        _require_https(self._url, request.type, urlsplit(rest[-1]).scheme)
        return super().redirect_request(request, response, *rest)


def _require_https(url: RemoteUrl, before: str, after: str) -> None:
    """Raise RemoteError if a redirect leads from https to another scheme."""
    if after not in (before, "https"):
        raise RemoteError(
            f"{url}: the host redirects to an address that is not https://, which is refused; give the address of the file "
            "itself"
        )


def _open(url: RemoteUrl, **headers: str) -> HTTPResponse:
    query = f"?{url.query}" if url.query else ""
    address = f"{url.scheme}://{url.container}/{quote(url.path, safe=_IN_PATHS)}{query}"
    request = urllib.request.Request(address, headers={"User-Agent": "tensorferry", **headers})
    if url.credentials:
        encoded = b64encode(unquote(url.credentials).encode()).decode()
        # "Unredirected" headers are not sent to the target of a redirect.
        request.add_unredirected_header("Authorization", f"Basic {encoded}")
    opener = urllib.request.build_opener(_Redirects(url))
    try:
        return cast(HTTPResponse, opener.open(request, timeout=_TIMEOUT_SECONDS))
    except urllib.request.HTTPError as error:
        error.close()
        raise


def _version_in(response: HTTPResponse) -> str | None:
    return response.headers["ETag"] or response.headers["Last-Modified"]


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
