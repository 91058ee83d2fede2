"""Compressed messages: what they unpack to is bounded by what came."""

from __future__ import annotations

import gzip
import random
import zlib

import pytest

from tensorferry.server.errors import InvalidRequestError, LimitError
from tensorferry.server.wire.compression import FREE_BYTES, MOST_RATIO, unpacked

MOST = 64 << 20
PACK = pytest.mark.parametrize("pack", [gzip.compress, zlib.compress], ids=["gzip", "deflate"])
NOISE = random.Random(1).randbytes(100_000)


@PACK
def test_what_was_packed_is_unpacked(pack: type[bytes]) -> None:
    for data in (b"", b"\x0a\x01m", NOISE, bytes(FREE_BYTES)):
        assert unpacked(pack(data), MOST) == data


@PACK
def test_more_than_the_multiple_is_refused(pack: type[bytes]) -> None:
    """Noise that does not shrink, and as many zeros as the multiple allows or one more."""
    zeros = bytes(MOST_RATIO * len(NOISE) - len(NOISE))
    assert len(unpacked(pack(NOISE + zeros), MOST)) == MOST_RATIO * len(NOISE)
    with pytest.raises(InvalidRequestError, match=r"unpacks to more than .* send it without compression"):
        unpacked(pack(NOISE + zeros + bytes(5_000_000)), MOST)
    with pytest.raises(InvalidRequestError, match=f"unpacks to more than {FREE_BYTES} bytes"):
        unpacked(pack(bytes(FREE_BYTES + 1)), MOST)


@PACK
def test_more_than_the_most_is_refused(pack: type[bytes]) -> None:
    with pytest.raises(LimitError, match="unpacks to more than 1000; this method takes at most 1000 bytes"):
        unpacked(pack(bytes(1001)), 1000)
    assert unpacked(pack(bytes(1000)), 1000) == bytes(1000)
    with pytest.raises(LimitError, match="has 1001 bytes"):
        unpacked(bytes(1001), 1000)


def test_what_is_damaged_is_refused() -> None:
    packed = gzip.compress(NOISE)
    with pytest.raises(InvalidRequestError, match="ends before its last block"):
        unpacked(packed[:-9], MOST)
    with pytest.raises(InvalidRequestError, match="is damaged"):
        unpacked(packed[:100] + b"\xff" * 100 + packed[200:], MOST)


def test_what_only_begins_as_if_it_were_packed_is_left_alone() -> None:
    """A protobuf field of number 15 begins as zlib does."""
    assert unpacked(b"x\x9c\x01", MOST) == b"x\x9c\x01"
