"""Compressed messages: the size they may decompress to depends on their own."""

from __future__ import annotations

import gzip
import random
import zlib

import pytest

from tensorferry.server.errors import InvalidRequestError, LimitError
from tensorferry.server.wire.receiving import ALWAYS_ALLOWED_BYTES, MAX_RATIO, decompress

MAX_BYTES = 64 << 20
COMPRESSIONS = pytest.mark.parametrize("compress", [gzip.compress, zlib.compress], ids=["gzip", "deflate"])
NOISE = random.Random(1).randbytes(100_000)


@COMPRESSIONS
def test_a_compressed_message_is_decompressed(compress: type[bytes]) -> None:
    for data in (b"", b"\x0a\x01m", NOISE, bytes(ALWAYS_ALLOWED_BYTES)):
        assert decompress(compress(data), MAX_BYTES) == data


@COMPRESSIONS
def test_more_than_the_allowed_ratio_is_refused(compress: type[bytes]) -> None:
    """Noise does not shrink; zeros fill it up to the ratio, or above."""
    zeros = bytes(MAX_RATIO * len(NOISE) - len(NOISE))
    assert len(decompress(compress(NOISE + zeros), MAX_BYTES)) == MAX_RATIO * len(NOISE)
    with pytest.raises(InvalidRequestError, match=r"unpacks to more than .* send it without compression"):
        decompress(compress(NOISE + zeros + bytes(5_000_000)), MAX_BYTES)
    with pytest.raises(InvalidRequestError, match=f"unpacks to more than {ALWAYS_ALLOWED_BYTES} bytes"):
        decompress(compress(bytes(ALWAYS_ALLOWED_BYTES + 1)), MAX_BYTES)


@COMPRESSIONS
def test_more_than_the_largest_message_is_refused(compress: type[bytes]) -> None:
    with pytest.raises(LimitError, match="unpacks to more than 1000; this method takes at most 1000 bytes"):
        decompress(compress(bytes(1001)), 1000)
    assert decompress(compress(bytes(1000)), 1000) == bytes(1000)
    with pytest.raises(LimitError, match="has 1001 bytes"):
        decompress(bytes(1001), 1000)


def test_a_damaged_message_is_refused() -> None:
    compressed = gzip.compress(NOISE)
    with pytest.raises(InvalidRequestError, match="ends before its last block"):
        decompress(compressed[:-9], MAX_BYTES)
    with pytest.raises(InvalidRequestError, match="is damaged"):
        decompress(compressed[:100] + b"\xff" * 100 + compressed[200:], MAX_BYTES)
    with pytest.raises(InvalidRequestError, match="has other bytes after its end"):
        decompress(compressed + gzip.compress(b"\x0a\x01m"), MAX_BYTES)


def test_a_message_that_only_begins_like_a_compressed_one_is_unchanged() -> None:
    """A protobuf field of number 15 begins like zlib."""
    assert decompress(b"x\x9c\x01", MAX_BYTES) == b"x\x9c\x01"
