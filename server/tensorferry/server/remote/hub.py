"""Files of Hugging Face's hub: huggingface_hub finds them, and they are read as those of a web server."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any
from urllib.parse import quote

from tensorferry.server.remote.failures import RemoteError, failure_of
from tensorferry.server.remote.https import TIMEOUT_SECONDS, HttpsStore
from tensorferry.server.remote.stores import MOST_FILES, RemoteFile, package
from tensorferry.server.remote.url import RemoteUrl

_DEFAULT_REVISION = "main"
_SHA256 = re.compile(r"[0-9a-f]{64}")


class HubStore:
    """The hub at `endpoint`, by default that of HF_ENDPOINT, with the token of HF_TOKEN or of `hf auth login`.

    A file is described by its commit, so a model and the files beside it are of the same commit. They are read by ranges,
    because huggingface_hub does not continue the download of an earlier process.
    """

    def __init__(self, endpoint: str | None = None) -> None:
        self._endpoint = endpoint
        self._files = HttpsStore(self._web_address, _authorization)

    def describe(self, url: RemoteUrl) -> RemoteFile:
        """Return the state of a file in the commit that the revision names now."""
        hub = _hub(url)
        try:
            found = hub.get_hf_file_metadata(
                self._web_address(url), token=hub.get_token() or False, timeout=TIMEOUT_SECONDS
            )
        except Exception as error:
            raise failure_of(url, error) from None
        if not found.commit_hash:
            raise RemoteError(
                f"{url}: the answer names no commit, so it is not from a hub; check HF_ENDPOINT, and proxies on the way"
            )
        return _file(replace(url, revision=found.commit_hash), found.etag, found.size, found.etag)

    def _web_address(self, url: RemoteUrl) -> str:
        revision = url.revision or _DEFAULT_REVISION
        return str(_hub(url).hf_hub_url(url.container, url.path, revision=revision, endpoint=self._endpoint))

    def read(self, file: RemoteFile, offset: int) -> tuple[int, Iterator[bytes]]:
        """Return the bytes from `offset` on."""
        return self._files.read(file, offset)

    def list(self, url: RemoteUrl) -> Mapping[str, RemoteFile]:
        """Return the files of a repository or of a directory in it, all of one commit."""
        api = _hub(url).HfApi(self._endpoint)
        try:
            commit = api.repo_info(url.container, revision=url.revision or _DEFAULT_REVISION).sha
            tree = api.list_repo_tree(url.container, url.path or None, recursive=True, revision=commit)
            # Each page names the next one, so that a list may have no end.
            entries = list(islice(tree, MOST_FILES + 1))
        except Exception as error:
            raise failure_of(url, error) from None
        root = f"{url.path}/" if url.path else ""
        at_commit = replace(url, revision=commit)
        return {
            entry.path.removeprefix(root): _file(
                at_commit.below(entry.path.removeprefix(root)),
                entry.blob_id,
                entry.size,
                entry.lfs.sha256 if entry.lfs else None,
            )
            for entry in entries
            if hasattr(entry, "blob_id")
        }


def _hub(url: RemoteUrl) -> Any:
    return package("huggingface_hub", "hf", url)


def _file(url: RemoteUrl, version: str | None, size: int | None, digest: str | None) -> RemoteFile:
    """Return a file. The hub identifies large files by their SHA-256."""
    return RemoteFile(url, version, size, digest if digest and _SHA256.fullmatch(digest) else None)


def _authorization(url: RemoteUrl) -> Mapping[str, str]:
    token = _hub(url).get_token()
    return {"Authorization": f"Bearer {quote(token, safe='~-._+/=')}"} if token else {}
