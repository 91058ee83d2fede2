"""From the bytes of a message to the message: unpacked, held against the table of bounds, then parsed."""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import Message

from tensorferry.server.errors import InvalidRequestError
from tensorferry.server.wire import bounds, structure
from tensorferry.server.wire.compression import decompress

_Message = TypeVar("_Message", bound=Message)


def receive(data: bytes, kind: type[_Message], most: int = bounds.MAX_MESSAGE_BYTES) -> _Message:
    """The message of this kind in these bytes, of at most `most` when it is unpacked.

    LimitError for one that is larger, InvalidRequestError for one that is not of the kind, or that exceeds a bound; none of
    these is parsed. The caller must have checked before that the client may call.
    """
    data = decompress(data, most)
    structure.check_message(data, kind)
    return parse(data, kind)


def parse(data: bytes, kind: type[_Message]) -> _Message:
    """The message of this kind in bytes that were checked; InvalidRequestError when they are none."""
    try:
        return kind.FromString(data)
    except Exception:
        raise InvalidRequestError(
            f"the message of {len(data)} bytes is not a {kind.DESCRIPTOR.name}"
        ) from None
