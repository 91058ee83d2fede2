"""Protobuf's wire format: finds the fields of a serialised message without parsing it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, TypeAlias

# A field: number, wire type, start and end of its value.
Field: TypeAlias = tuple[int, int, int, int]

VARINT, FIXED64, DELIMITED, FIXED32 = 0, 1, 2, 5

MAX_VARINT_BYTES = 10


class Data(Protocol):
    """Bytes by their position, such as those of a message. IndexError beyond their end."""

    def __getitem__(self, at: int, /) -> int:
        """Return a byte."""


class MalformedError(ValueError):
    """The bytes are no protobuf message, or have groups, which no message of ours has."""


def fields(data: Data, at: int, end: int) -> Iterator[Field]:
    """Yield the fields of the message between two positions, in order. MalformedError if it is none.

    A step takes the same time for every size of the value.
    """
    try:
        while at < end:
            tag = data[at]
            at += 1
            if tag > 127:
                tag, at = varint(data, at - 1)
            kind = tag & 7
            start = at
            if kind == DELIMITED:
                size = data[at]
                start = at + 1
                if size > 127:
                    size, start = varint(data, at)
                at = start + size
            elif kind == VARINT:
                _, at = varint(data, at)
            elif kind == FIXED64:
                at += 8
            elif kind == FIXED32:
                at += 4
            else:
                raise MalformedError(f"wire type {kind}")
            if at > end:
                raise MalformedError("a field goes on beyond the end of its message")
            yield tag >> 3, kind, start, at
    except IndexError:
        raise MalformedError("the message ends within a field") from None


def varint(data: Data, at: int) -> tuple[int, int]:
    """Return the number at a position, and its end. IndexError if the data ends before."""
    value = 0
    for shift in range(0, 7 * MAX_VARINT_BYTES, 7):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise MalformedError("a number of more than 10 bytes")


def encode_varint(value: int) -> bytes:
    """Return a number of at least 0 as protobuf writes it."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)
