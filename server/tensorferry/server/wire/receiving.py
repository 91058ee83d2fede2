"""From bytes to a message: decompressed, checked against the table of bounds, then parsed."""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import Message

from tensorferry.server.errors import InvalidRequestError
from tensorferry.server.wire import bounds, structure
from tensorferry.server.wire.compression import decompress

_Message = TypeVar("_Message", bound=Message)


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
