"""Compressed messages: what they unpack to is bounded by what came."""

from __future__ import annotations

import gzip
import random
import zlib

import pytest

from tensorferry.server.errors import InvalidRequestError, LimitError
from tensorferry.server.wire.compression import ALWAYS_ALLOWED_BYTES, MAX_RATIO, decompress

MOST = 64 << 20
PACK = pytest.mark.parametrize("pack", [gzip.compress, zlib.compress], ids=["gzip", "deflate"])
NOISE = random.Random(1).randbytes(100_000)


@PACK
def test_what_was_packed_is_unpacked(pack: type[bytes]) -> None:
    for data in (b"", b"\x0a\x01m", NOISE, bytes(ALWAYS_ALLOWED_BYTES)):
        assert decompress(pack(data), MOST) == data


@PACK
def test_more_than_the_multiple_is_refused(pack: type[bytes]) -> None:
    """Noise that does not shrink, and as many zeros as the multiple allows or one more."""
    zeros = bytes(MAX_RATIO * len(NOISE) - len(NOISE))
    assert len(decompress(pack(NOISE + zeros), MOST)) == MAX_RATIO * len(NOISE)
    with pytest.raises(InvalidRequestError, match=r"unpacks to more than .* send it without compression"):
        decompress(pack(NOISE + zeros + bytes(5_000_000)), MOST)
    with pytest.raises(InvalidRequestError, match=f"unpacks to more than {ALWAYS_ALLOWED_BYTES} bytes"):
        decompress(pack(bytes(ALWAYS_ALLOWED_BYTES + 1)), MOST)


@PACK
def test_more_than_the_most_is_refused(pack: type[bytes]) -> None:
    with pytest.raises(LimitError, match="unpacks to more than 1000; this method takes at most 1000 bytes"):
        decompress(pack(bytes(1001)), 1000)
    assert decompress(pack(bytes(1000)), 1000) == bytes(1000)
    with pytest.raises(LimitError, match="has 1001 bytes"):
        decompress(bytes(1001), 1000)


def test_what_is_damaged_is_refused() -> None:
    packed = gzip.compress(NOISE)
    with pytest.raises(InvalidRequestError, match="ends before its last block"):
        decompress(packed[:-9], MOST)
    with pytest.raises(InvalidRequestError, match="is damaged"):
        decompress(packed[:100] + b"\xff" * 100 + packed[200:], MOST)


def test_what_only_begins_as_if_it_were_packed_is_left_alone() -> None:
    """A protobuf field of number 15 begins as zlib does."""
    assert decompress(b"x\x9c\x01", MOST) == b"x\x9c\x01"
