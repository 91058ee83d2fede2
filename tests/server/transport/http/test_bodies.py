"""Bodies in chunks, and compressed bodies."""

from __future__ import annotations

import gzip
import zlib

import pytest

from tensorferry.server.transport.http.bodies import ChunkedBody, unpacked
from tensorferry.server.transport.http.errors import HttpError

CHUNKS = b"3\r\nabc\r\nA;name=value\r\n0123456789\r\n0\r\nTrailer: x\r\n\r\n"


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_chunks_are_joined_however_they_arrive(size: int) -> None:
    body, data = ChunkedBody(100), CHUNKS + b"next"
    done = None
    at = 0
    while done is None:
        done = body.feed(data[at : at + size])
        at += size
    assert (done[0], done[1] + data[at:]) == (b"abc0123456789", b"next")


@pytest.mark.parametrize(
    "data",
    [
        b"g\r\n", b"\r\n", b" 1\r\na", b"-1\r\n", b"0x1\r\na", b"1\na\r\n", b"1\r\nab\r\n", b"1\r\na\n0\r\n\r\n", b"1" * 301, b"1;\x00\r\n", b"1 \r\na\r\n",
        b"0\r\nX: y\n\nGET / HTTP/1.1\r\n\r\n", b"0\r\nGET / HTTP/1.1\r\n\r\n",
    ],
)  # fmt: skip
def test_malformed_chunks_are_refused(data: bytes) -> None:
    with pytest.raises(HttpError) as error:
        ChunkedBody(100).feed(data)
    assert error.value.status == 400


def test_chunks_are_bounded_together() -> None:
    body = ChunkedBody(10)
    assert body.feed(b"6\r\n123456\r\n") is None
    with pytest.raises(HttpError, match="at most 10") as error:
        body.feed(b"5\r\n")
    assert error.value.status == 413
    with pytest.raises(HttpError, match="trailers") as error:
        ChunkedBody(10).feed(b"0\r\n" + b"X: y\r\n" * 5000)
    assert error.value.status == 431


def test_the_number_of_chunks_is_bounded() -> None:
    most = 65536
    assert ChunkedBody(most).feed(b"1\r\nx\r\n" * most + b"0\r\n\r\n") == (b"x" * most, b"")
    with pytest.raises(HttpError, match="more than 65536 chunks; send larger chunks") as error:
        ChunkedBody(most + 1).feed(b"1\r\nx\r\n" * (most + 1))
    assert error.value.status == 400


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_compressed_bodies_are_unpacked_within_a_bound(encoding: str) -> None:
    data = bytes(1000)
    packed = gzip.compress(data) if encoding == "gzip" else zlib.compress(data)
    assert unpacked(packed, encoding, 1000) == data
    for body, most, status in (
        (packed, 999, 413),
        (packed[:-1], 1000, 400),
        (packed + b"x", 1000, 400),
        (b"no", 1000, 400),
    ):
        with pytest.raises(HttpError) as error:
            unpacked(body, encoding, most)
        assert error.value.status == status


def test_other_encodings_are_refused() -> None:
    with pytest.raises(HttpError, match="takes gzip and deflate") as error:
        unpacked(b"", "br", 10)
    assert (error.value.status, error.value.headers) == (415, "Accept-Encoding: gzip, deflate\r\n")
