"""Files of web servers, by HTTP's ranges and ETags."""

from __future__ import annotations

import re
import urllib.request
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from http.client import HTTPMessage, HTTPResponse
from typing import IO, cast
from urllib.parse import quote, unquote, urlsplit

from tensorferry.server.remote.failures import ChangedError, RemoteError, failure_of
from tensorferry.server.remote.stores import RemoteFile
from tensorferry.server.remote.url import RemoteUrl

# Longest wait for a connection, and for the next bytes.
TIMEOUT_SECONDS = 30.0
_CHUNK_BYTES = 1 << 20
# A longer number is no size of a file.
_NUMBER = r"[0-9]{1,18}"
_RANGE = re.compile(rf"bytes (?:({_NUMBER})-{_NUMBER}|\*)/({_NUMBER}|\*)")
# Characters that stay as written in a path: those with a meaning there, and "%" of what is encoded.
_IN_PATHS = "/%:@!$&'()*+,;=~-._"


def _no_headers(url: RemoteUrl) -> Mapping[str, str]:
    return {}


class HttpsStore:
    """Web servers, without state. `headers` are sent to the host of an address, but not to others to which it redirects."""

    def __init__(
        self,
        web_address: Callable[[RemoteUrl], str] | None = None,
        headers: Callable[[RemoteUrl], Mapping[str, str]] = _no_headers,
        timeout: float = TIMEOUT_SECONDS,
    ) -> None:
        self._web_address = web_address or _own_address
        self._headers = headers
        self._timeout = timeout

    def describe(self, url: RemoteUrl) -> RemoteFile:
        """Return the current state of a file.

        It asks for the first byte, because presigned addresses refuse HEAD.
        """
        with self._open(url, {"Range": "bytes=0-0"}) as response:
            return RemoteFile(url, _version(response.headers), _size(response))

    def read(self, file: RemoteFile, offset: int) -> tuple[int, Iterator[bytes]]:
        """Return the bytes from `offset` on, or all if the server has no ranges."""
        headers = {}
        if offset:
            headers["Range"] = f"bytes={offset}-"
            if file.version is not None and file.version.startswith('"'):
                # An ETag that is not weak. The server sends the whole file if it has another.
                headers["If-Range"] = file.version
        response = self._open(file.url, headers)
        if file.version is not None and not file.url.immutable and _version(response.headers) != file.version:
            response.close()
            raise ChangedError(f"{file.url} has changed while it was downloaded; try again")
        start = 0
        if response.status == 206:
            match = _RANGE.fullmatch(response.headers.get("Content-Range", ""))
            start = int(match[1]) if match and match[1] else offset
        if start not in (0, offset):
            response.close()
            raise RemoteError(
                f"{file.url}: the host sent the bytes from {start} on instead of those from {offset} on; use another host"
            )
        return start, _chunks(file.url, response)

    def list(self, url: RemoteUrl) -> Mapping[str, RemoteFile]:
        """Refuse, because web servers have no lists of files."""
        raise RemoteError(f"{url}: web servers cannot list files")

    def _open(self, url: RemoteUrl, headers: Mapping[str, str]) -> HTTPResponse:
        request = urllib.request.Request(
            self._web_address(url), headers={"User-Agent": "tensorferry", **headers}
        )
        # "Unredirected" headers are not sent to the target of a redirect.
        for name, value in self._headers(url).items():
            request.add_unredirected_header(name, value)
        if url.credentials:
            encoded = b64encode(unquote(url.credentials).encode()).decode()
            request.add_unredirected_header("Authorization", f"Basic {encoded}")
        opener = urllib.request.build_opener(_Redirects(url))
        try:
            return cast(HTTPResponse, opener.open(request, timeout=self._timeout))
        except Exception as error:
            _close(error)
            raise failure_of(url, error) from None


def _own_address(url: RemoteUrl) -> str:
    query = f"?{url.query}" if url.query else ""
    return f"{url.scheme}://{url.container}/{quote(url.path, safe=_IN_PATHS)}{query}"


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
        if urlsplit(target).scheme not in {request.type, "https"}:
            raise RemoteError(
                f"{self._url}: the host redirects to an address that is not https://, which is refused; give the address of "
                "the file itself"
            )
        return super().redirect_request(request, response, code, message, headers, target)


def _chunks(url: RemoteUrl, response: HTTPResponse) -> Iterator[bytes]:
    with response:
        while True:
            try:
                # What has arrived, so that a slow host is noticed before the chunk is full.
                chunk = response.read1(_CHUNK_BYTES)
            except Exception as error:
                raise failure_of(url, error) from None
            if not chunk:
                return
            yield chunk


def _version(headers: HTTPMessage) -> str | None:
    return headers.get("ETag") or headers.get("Last-Modified")


def _size(response: HTTPResponse) -> int | None:
    if response.status == 206:
        match = _RANGE.fullmatch(response.headers.get("Content-Range", ""))
        return int(match[2]) if match and match[2] != "*" else None
    length = response.headers.get("Content-Length", "")
    return int(length) if re.fullmatch(_NUMBER, length) else None


def _close(error: BaseException) -> None:
    """Close the response that an error of urllib holds."""
    if isinstance(error, urllib.request.HTTPError):
        error.close()
