"""Heads of HTTP/1.1 requests (RFC 9112). The parser is strict: what a proxy may read in another way is refused."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tensorferry.server.identity import Metadata
from tensorferry.server.transport.http.errors import ErrorForm, HttpError

MAX_HEAD_BYTES = 16 << 10
_MAX_FIELDS = 100
# Heads that are kept, and the largest that is.
_MAX_KEPT, _MAX_KEPT_BYTES = 256, 2 << 10

# The path, perhaps after the scheme and the host, which proxies send.
_LINE = re.compile(rb"([A-Z]{1,16}) (?:https?://[A-Za-z0-9._~:%\[\]-]+)?(/[!-~]*) HTTP/1\.([01])\r\n")
# A name, a colon, and a value without control characters. No blank before the colon, no value in several lines. Possessive,
# because a value of blanks would otherwise take time by the square of its length.
FIELD = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]++):[ \t]*+([^\x00-\x08\x0a-\x1f\x7f]*+)\r\n")
_LENGTH = re.compile(r"[0-9]{1,18}")
_ONCE = frozenset(
    ("host", "content-length", "transfer-encoding", "content-encoding", "inference-header-content-length")
)


class Routed(NamedTuple):
    """What serves a request, or the error that answers it, and the form of its errors.

    `lines` are headers of each response, without the last line break; empty for none.
    """

    target: Any
    errors: ErrorForm
    lines: bytes = b""


# Returns this for a method, a path without its query, and the fields by their lower-case names.
Router = Callable[[str, str, Mapping[str, str]], Routed]


class Head:
    """The line and the fields of a request.

    `fields` have lower-case names. `length` is that of the body, unless it is `chunked`. `json_length` is the header
    Inference-Header-Content-Length, `timeout` the seconds of X-Request-Timeout; None without them. `is_old` means HTTP/1.0.
    `target`, `errors` and `lines` are as in `Routed`. `path` is as it came, without the query. With `is_plain`, the response
    is sent as it was made.
    """

    def __init__(
        self, method: str, path: str, fields: Metadata, values: Mapping[str, str], minor: int, route: Router
    ) -> None:
        self.method, self.path, self.fields = method, path, fields
        connection = {token.strip() for token in values.get("connection", "").lower().split(",")}
        self.is_old = not minor
        self.keep_alive = "close" not in connection if minor else "keep-alive" in connection
        self.chunked = "transfer-encoding" in values
        self.length = _natural(values, "content-length") or 0
        self.expects_continue = values.get("expect", "").lower() == "100-continue" and minor == 1
        self.encoding = values.get("content-encoding", "").strip().lower() or "identity"
        self.accepts_gzip = _accepts_gzip(values.get("accept-encoding", ""))
        self.json_length: int | None = None
        self.timeout: float | None = None
        self.target, self.errors, self.lines = route(method, path, values)
        try:
            self.json_length = _natural(values, "inference-header-content-length")
            self.timeout = _seconds(values.get("x-request-timeout"))
        except HttpError as error:
            # The request can be read to its end, so it is answered in the form of its path.
            self.target = error.with_traceback(None)
        self.is_plain = not (self.is_old or self.lines or method == "HEAD")


def parse_head(block: bytes, route: Router) -> Head:
    """Parse a head with its empty line. HttpError if it is malformed, or its meaning is not certain."""
    if len(block) > MAX_HEAD_BYTES:
        raise HttpError(431, f"the headers have more than {MAX_HEAD_BYTES} bytes")
    line = _LINE.match(block)
    if line is None:
        raise HttpError(400, "the first line is not that of an HTTP/1.1 request")
    method, target, minor = line.groups()
    at, end = line.end(), len(block) - 2
    fields: list[tuple[str, str]] = []
    values: dict[str, str] = {}
    while at < end:
        found = FIELD.match(block, at)
        if found is None or len(fields) == _MAX_FIELDS:
            what = "a header is malformed" if found is None else f"there are more than {_MAX_FIELDS} headers"
            raise HttpError(400 if found is None else 431, what)
        name, value = found[1].decode("ascii").lower(), found[2].rstrip(b" \t").decode("latin-1")
        if name in values:
            if name in _ONCE:
                raise HttpError(400, f"the header {name!r} is given twice")
            values[name] = f"{values[name]}, {value}"
        else:
            values[name] = value
        fields.append((name, value))
        at = found.end()
    if minor == b"1" and "host" not in values:
        raise HttpError(400, "HTTP/1.1 needs a header Host")
    if "transfer-encoding" in values:
        if values["transfer-encoding"].lower() != "chunked":
            raise HttpError(501, "the only Transfer-Encoding is chunked")
        if "content-length" in values or minor == b"0":
            raise HttpError(400, "Transfer-Encoding is given with Content-Length, or in HTTP/1.0")
    path = target.partition(b"?")[0].decode("ascii")
    return Head(method.decode("ascii"), path, tuple(fields), values, int(minor), route)


class HeadCache:
    """Parsed heads by their bytes, because a client sends nearly the same head with each request. Not thread-safe."""

    def __init__(self, route: Router) -> None:
        self._route = route
        self._heads: dict[bytes, Head] = {}

    def get(self, block: bytes) -> Head:
        """Return the head; `HttpError` as `parse_head`."""
        head = self._heads.get(block)
        if head is None:
            head = parse_head(block, self._route)
            if len(block) <= _MAX_KEPT_BYTES:
                if len(self._heads) >= _MAX_KEPT:
                    self._heads.clear()
                self._heads[block] = head
        return head


def _natural(values: Mapping[str, str], name: str) -> int | None:
    value = values.get(name)
    if value is None:
        return None
    if not _LENGTH.fullmatch(value):
        raise HttpError(400, f"the header {name!r} is {value!r}; it must be a number of bytes")
    return int(value)


def _seconds(value: str | None) -> float | None:
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < math.inf:
        raise HttpError(400, f"X-Request-Timeout is {value!r}; it must be a number of seconds above 0")
    return seconds


def _accepts_gzip(value: str) -> bool:
    """Whether the header Accept-Encoding names gzip, without the quality 0."""
    for part in value.lower().split(","):
        coding, _, quality = part.partition(";")
        if coding.strip() == "gzip":
            return not re.fullmatch(r"\s*q\s*=\s*0(\.0*)?\s*", quality)
    return False
