"""Files of web servers, by the standard library."""

from __future__ import annotations

import io
import re
import urllib.request
from base64 import b64encode
from collections.abc import Mapping
from http.client import HTTPMessage, HTTPResponse
from typing import IO, cast
from urllib.parse import quote, unquote, urlsplit

from tensorferry.server.models.remote.download import RemoteFile
from tensorferry.server.models.remote.failures import ChangedError, RemoteError
from tensorferry.server.models.remote.url import RemoteUrl

# Longest wait for a connection, and for the next bytes.
TIMEOUT_SECONDS = 30.0
# Characters that stay as written in a path: those with a meaning there, and "%" of what is encoded.
_IN_PATHS = "/%:@!$&'()*+,;=~-._"


class HttpsStore:
    """Web servers, which have no lists of files."""

    def describe(self, url: RemoteUrl) -> RemoteFile:
        """Return the current state of a file. It asks for the first byte, because presigned addresses refuse HEAD."""
        with _open(url, {"Range": "bytes=0-0"}) as response:
            headers = response.headers
            size = (headers["Content-Range"] or headers["Content-Length"] or "").rpartition("/")[2]
            # A longer number is no size of a file.
            known = int(size) if re.fullmatch("[0-9]{1,18}", size) else None
            return RemoteFile(url, _version(response), known)

    def read(self, file: RemoteFile, output: io.FileIO) -> None:
        """Write the content of a file."""
        with _open(file.url, {}) as response:
            if file.version not in (None, _version(response)):
                raise ChangedError(f"{file.url} has changed while it was downloaded; try again")
            # What has arrived, so that a slow host is noticed before the chunk is full.
            while chunk := response.read1(1 << 20):
                output.write(chunk)

    def list(self, url: RemoteUrl) -> Mapping[str, RemoteFile]:
        """Raise RemoteError, because web servers have no lists of files."""
        raise RemoteError(f"{url}: web servers cannot list files")


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, but not from https to http."""

    def __init__(self, url: RemoteUrl) -> None:
        self._url = url

    def redirect_request(
        self,
        request: urllib.request.Request,
        response: IO[bytes],
        code: int,
        message: str,
        headers: HTTPMessage,
        target: str,
    ) -> urllib.request.Request | None:
        # Its body is not needed. urllib would read it as a whole.
        response.close()
        require_https(self._url, request.type, urlsplit(target).scheme)
        return super().redirect_request(request, response, code, message, headers, target)


def require_https(url: RemoteUrl, before: str, after: str) -> None:
    """Raise RemoteError if a redirect leads from https to another scheme."""
    if after not in (before, "https"):
        raise RemoteError(
            f"{url}: the host redirects to an address that is not https://, which is refused; give the address of the file "
            "itself"
        )


def _open(url: RemoteUrl, headers: Mapping[str, str]) -> HTTPResponse:
    query = f"?{url.query}" if url.query else ""
    address = f"{url.scheme}://{url.container}/{quote(url.path, safe=_IN_PATHS)}{query}"
    request = urllib.request.Request(address, headers={"User-Agent": "tensorferry", **headers})
    if url.credentials:
        encoded = b64encode(unquote(url.credentials).encode()).decode()
        # "Unredirected" headers are not sent to the target of a redirect.
        request.add_unredirected_header("Authorization", f"Basic {encoded}")
    opener = urllib.request.build_opener(_Redirects(url))
    try:
        return cast(HTTPResponse, opener.open(request, timeout=TIMEOUT_SECONDS))
    except urllib.request.HTTPError as error:
        error.close()
        raise


def _version(response: HTTPResponse) -> str | None:
    return response.headers["ETag"] or response.headers["Last-Modified"]
