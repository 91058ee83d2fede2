"""Compressed messages, unpacked within bounds.

gRPC's core would unpack any message up to the server's largest: 61 KB become 60 MB. Its option
`grpc.per_message_decompression` is therefore off, and core passes messages on as they are received.
"""

from __future__ import annotations

import zlib

from tensorferry.server.errors import InvalidRequestError, LimitError

# Every message may unpack to this number of bytes, because a small tensor of zeros shrinks to a thousandth of its size.
ALWAYS_ALLOWED_BYTES = 4 << 20
# A larger message may be at most this multiple of what was received. Tensors of measured values seldom shrink to a tenth.
MAX_RATIO = 100

_GZIP = b"\x1f\x8b"
_ZLIB = 0x78
_GZIP_BITS, _ZLIB_BITS = 31, 15


def is_compressed(data: bytes) -> bool:
    """Whether a message may be compressed, by its first bytes.

    None of a protobuf message are those of gzip. Those of zlib (gRPC's "deflate") stand for a field of number 15, which
    no message of ours has.
    """
    return data[:2] == _GZIP or (data[:1] == b"x" and int.from_bytes(data[:2], "big") % 31 == 0)


def decompress(data: bytes, most: int) -> bytes:
    """The message, of at most `most` bytes, unpacked where it is compressed.

    LimitError for one that is larger. InvalidRequestError for one that unpacks to more than `ALWAYS_ALLOWED_BYTES` and more than
    `MAX_RATIO` times its size, or that is cut off or damaged.
    """
    if not is_compressed(data):
        if len(data) > most:
            raise _too_large(f"has {len(data)} bytes", most)
        return data
    is_gzip = data[:2] == _GZIP
    allowed = min(most, max(ALWAYS_ALLOWED_BYTES, MAX_RATIO * len(data)))
    unpacking = zlib.decompressobj(_GZIP_BITS if is_gzip else _ZLIB_BITS)
    damage = ""
    try:
        # Without the interpreter's lock.
        message = unpacking.decompress(data, allowed + 1)
    except zlib.error as error:
        message, damage = b"", f"is damaged: {error}"
    if len(message) > most:
        raise _too_large(f"of {len(data)} bytes unpacks to more than {most}", most)
    if len(message) > allowed:
        raise InvalidRequestError(
            f"the compressed message of {len(data)} bytes unpacks to more than {allowed} bytes; this server takes "
            f"{ALWAYS_ALLOWED_BYTES} bytes, or {MAX_RATIO} times what is sent: send it without compression"
        )
    if unpacking.eof:
        return message
    if not is_gzip and len(data) <= most:
        # It may be no compressed message after all.
        return data
    raise InvalidRequestError(
        f"the compressed message of {len(data)} bytes {damage or 'ends before its last block: send all of it'}"
    )


def _too_large(what: str, most: int) -> LimitError:
    return LimitError(f"the message {what}; this method takes at most {most} bytes")
