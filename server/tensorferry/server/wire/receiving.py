"""From bytes to a message: decompressed, checked against the table of bounds, then parsed.

gRPC core would decompress any message up to the server's largest: 61 KB become 60 MB. Its option
`grpc.per_message_decompression` is therefore off, and core passes on messages as they arrive.
"""

from __future__ import annotations

import zlib
from typing import TypeVar

from google.protobuf.message import Message

from tensorferry.server.errors import InvalidRequestError, LimitError
from tensorferry.server.wire import bounds, structure

_Message = TypeVar("_Message", bound=Message)

# Every message may decompress to this size, because a small tensor of zeros shrinks to a thousandth.
ALWAYS_ALLOWED_BYTES = 4 << 20
# A larger message may be this multiple of the bytes received. Measured values seldom shrink to a tenth.
MAX_RATIO = 100

_GZIP = b"\x1f\x8b"
_GZIP_BITS, _ZLIB_BITS = 31, 15


def receive(data: bytes, kind: type[_Message], max_bytes: int = bounds.MAX_MESSAGE_BYTES) -> _Message:
    """Return the message of this type, of at most `max_bytes` when decompressed.

    LimitError for a larger one. InvalidRequestError for one of another type, or above a bound. Neither is parsed.
    Check first that the client may call the method.
    """
    data = decompress(data, max_bytes)
    structure.check_message(data, kind)
    return parse(data, kind)


def parse(data: bytes, kind: type[_Message]) -> _Message:
    """Return the message of this type in checked bytes. InvalidRequestError if they are none."""
    try:
        return kind.FromString(data)
    except Exception:
        raise InvalidRequestError(
            f"the message of {len(data)} bytes is not a {kind.DESCRIPTOR.name}"
        ) from None


def is_compressed(data: bytes) -> bool:
    """Whether a message's first bytes are those of gzip or zlib (gRPC's "deflate").

    No protobuf message begins like gzip. One with field number 15 may begin like zlib; none of ours has that field.
    """
    return data[:2] == _GZIP or (data[:1] == b"x" and int.from_bytes(data[:2], "big") % 31 == 0)


def decompress(data: bytes, max_bytes: int) -> bytes:
    """Return the message, decompressed if it is compressed.

    LimitError for a message of more than `max_bytes`. InvalidRequestError for a damaged one, and for one that
    decompresses to more than both `ALWAYS_ALLOWED_BYTES` and `MAX_RATIO` times its size.
    """
    if not is_compressed(data):
        if len(data) > max_bytes:
            raise _too_large(f"has {len(data)} bytes", max_bytes)
        return data
    is_gzip = data[:2] == _GZIP
    allowed = min(max_bytes, max(ALWAYS_ALLOWED_BYTES, MAX_RATIO * len(data)))
    decompressor = zlib.decompressobj(_GZIP_BITS if is_gzip else _ZLIB_BITS)
    damage = ""
    try:
        # zlib releases the GIL.
        message = decompressor.decompress(data, allowed + 1)
    except zlib.error as error:
        message, damage = b"", f"is damaged: {error}"
    if len(message) > max_bytes:
        raise _too_large(f"of {len(data)} bytes unpacks to more than {max_bytes}", max_bytes)
    if len(message) > allowed:
        raise InvalidRequestError(
            f"the compressed message of {len(data)} bytes unpacks to more than {allowed} bytes; this server takes "
            f"{ALWAYS_ALLOWED_BYTES} bytes, or {MAX_RATIO} times what is sent: send it without compression"
        )
    if decompressor.unused_data:
        damage = "has other bytes after its end: send it as one gzip member"
    elif decompressor.eof:
        return message
    if not is_gzip and len(data) <= max_bytes:
        # Probably no compressed message: parsing decides.
        return data
    raise InvalidRequestError(
        f"the compressed message of {len(data)} bytes {damage or 'ends before its last block: send all of it'}"
    )


def _too_large(what: str, max_bytes: int) -> LimitError:
    return LimitError(f"the message {what}; this method takes at most {max_bytes} bytes")
