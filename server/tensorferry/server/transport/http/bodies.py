"""Bodies of HTTP requests: with a length, in chunks, and compressed."""

from __future__ import annotations

import re
import zlib

from tensorferry.server.transport.http.errors import HttpError
from tensorferry.server.transport.http.heads import FIELD, MAX_HEAD_BYTES

# The size of a chunk in hexadecimal digits, perhaps with an extension, which means nothing here.
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:[ \t]*;[^\x00-\x08\x0a-\x1f\x7f]{0,256})?\r\n")
_MAX_SIZE_LINE = 300
# Of a body, as Triton has it, because reading many chunks stops all other requests.
_MAX_CHUNKS = 65536
_GZIP_BITS, _ZLIB_BITS = 31, 15
ENCODINGS = ("gzip", "deflate")


class SizedBody:
    """A body of `length` bytes."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._parts: list[bytes] = []
        self._missing = length

    def feed(self, data: bytes) -> tuple[bytes, bytes] | None:
        """Take bytes; return the body and what follows it once it is complete."""
        self._parts.append(data)
        self._missing -= len(data)
        if self._missing > 0:
            return None
        data = b"".join(self._parts)
        return data[: self._length], data[self._length :]


class ChunkedBody:
    """A body that arrives in chunks (RFC 9112, section 7.1), of at most `most` bytes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._body = bytearray()
        self._unread = b""
        # The bytes of the chunk that are missing, with its final line break; None between two chunks.
        self._missing: int | None = None
        self._chunks = 0
        # Whether the last chunk has come, which the trailers follow.
        self._last = False
        self._trailer_bytes = 0

    def feed(self, data: bytes) -> tuple[bytes, bytes] | None:
        """Take bytes; return the body and what follows it once it is complete. HttpError if it is malformed or too large."""
        data = self._unread + data if self._unread else data
        at = 0
        while not self._last:
            if self._missing is None:
                found = _SIZE.match(data, at)
                if found is None:
                    if len(data) - at > _MAX_SIZE_LINE or b"\n" in data[at:]:
                        raise HttpError(400, "the size of a chunk is malformed")
                    break
                at, size = found.end(), int(found[1], 16)
                if len(self._body) + size > self._most:
                    raise too_large(f"more than {self._most}", self._most)
                self._last = not size
                self._chunks += size > 0
                if self._chunks > _MAX_CHUNKS:
                    raise HttpError(400, f"the body has more than {_MAX_CHUNKS} chunks; send larger chunks")
                self._missing = size + 2
                continue
            take = min(self._missing - 2, len(data) - at)
            if take > 0:
                self._body += data[at : at + take]
                self._missing -= take
                at += take
            if self._missing > 2 or len(data) - at < 2:
                break
            if data[at : at + 2] != b"\r\n":
                raise HttpError(400, "a chunk is longer than its size")
            at, self._missing = at + 2, None
        self._unread = data[at:]
        return self._end() if self._last else None

    def _end(self) -> tuple[bytes, bytes] | None:
        """Return the body and what follows, if the trailers, which mean nothing here, are complete."""
        data, at = self._unread, 0
        while (found := FIELD.match(data, at)) is not None:
            at = found.end()
        self._trailer_bytes += at
        self._unread = data = data[at:]
        if self._trailer_bytes + len(data.partition(b"\n")[0]) > MAX_HEAD_BYTES:
            raise HttpError(431, "the trailers are too long")
        if data.startswith(b"\r\n"):
            return bytes(self._body), data[2:]
        if b"\n" in data:
            # A proxy may take the end of this line for that of the body.
            raise HttpError(400, "a trailer is malformed")
        return None


def unpacked(body: bytes, encoding: str, most: int) -> bytes:
    """Return a body without its Content-Encoding. HttpError if it is damaged, or has more than `most` bytes."""
    if encoding not in ENCODINGS:
        raise HttpError(
            415,
            f"the Content-Encoding is {encoding!r}; this server takes {' and '.join(ENCODINGS)}",
            headers="Accept-Encoding: gzip, deflate\r\n",
        )
    unpacker = zlib.decompressobj(_GZIP_BITS if encoding == "gzip" else _ZLIB_BITS)
    try:
        data = unpacker.decompress(body, most + 1)
    except zlib.error as error:
        raise HttpError(400, f"the body is not {encoding}: {error}") from None
    if len(data) > most:
        raise too_large(f"more than {most} unpacked", most)
    if not unpacker.eof or unpacker.unused_data:
        raise HttpError(400, f"the {encoding} body is cut off, or other bytes follow it")
    return data


def too_large(size: str, most: int) -> HttpError:
    """Return the error of a body that is too large."""
    return HttpError(
        413,
        f"the body has {size} bytes; this server takes at most {most}: send less at once, or start it with a larger "
        "--max-message-bytes",
    )
