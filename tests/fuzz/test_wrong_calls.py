"""Calls with a wrong message length, or wrong or too many headers: a good client is answered meanwhile
and after.
"""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

import pytest
from fuzz.attackers.attacks import (
    DEADLINE_EXCEEDED,
    GOOD,
    INTERNAL,
    INVALID_ARGUMENT,
    MAX_MESSAGE_BYTES,
    NOT_FOUND,
    OK,
    RESOURCE_EXHAUSTED,
    UNIMPLEMENTED,
    called,
    connect,
    sent,
)
from fuzz.attackers.raw import PREFIX, framed, headers_of
from fuzz.attackers.wire import Wire

pytestmark = pytest.mark.usefixtures("good_client")


@pytest.mark.parametrize(
    ("data", "allowed"),
    [
        (framed(GOOD, length=1 << 31), RESOURCE_EXHAUSTED),
        (framed(GOOD, length=(1 << 32) - 1), RESOURCE_EXHAUSTED),
        (framed(GOOD, length=MAX_MESSAGE_BYTES + 1), RESOURCE_EXHAUSTED),
        # An incomplete message is no message.
        (framed(GOOD, length=len(GOOD) + 1), UNIMPLEMENTED),
        (framed(GOOD)[:3], UNIMPLEMENTED),
        (b"", UNIMPLEMENTED),
        (framed(GOOD, length=len(GOOD) - 1), INVALID_ARGUMENT),
        (framed(b"\xff" * 100), INVALID_ARGUMENT),
        (framed(GOOD, flag=1), INTERNAL),
        # Core takes an unknown flag for an empty message.
        (framed(GOOD, flag=4), NOT_FOUND),
    ],
)
def test_a_wrong_length_prefix(wire: Wire, data: bytes, allowed: int) -> None:
    status, message = sent(wire, data)
    assert status == allowed, message
    assert "internal error" not in message


@pytest.mark.parametrize("method", ["ModelStreamInfer", "ServerLive", "ModelMetadata"])
def test_a_wrong_length_prefix_to_other_methods(wire: Wire, method: str) -> None:
    for data in (
        framed(GOOD, length=1 << 31),
        framed(GOOD, flag=1),
        framed(GOOD, length=len(GOOD) + 9),
        b"\0\0",
    ):
        status, message = sent(wire, data, path=PREFIX + method)
        # A stream whose last message is incomplete ends like one without messages.
        assert status in (OK, RESOURCE_EXHAUSTED, INTERNAL, UNIMPLEMENTED), message
        assert "internal error" not in message


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_compressed_garbage(wire: Wire, encoding: str) -> None:
    status, message = sent(wire, framed(b"no zip at all" * 9, flag=1), grpc_encoding=encoding)
    assert status == INVALID_ARGUMENT, message
    good = gzip.compress(GOOD) if encoding == "gzip" else zlib.compress(GOOD)
    assert sent(wire, framed(good, flag=1), grpc_encoding=encoding)[0] == OK
    assert sent(wire, framed(good[:-9], flag=1), grpc_encoding=encoding)[0] == INVALID_ARGUMENT
    # Core's message for an unknown encoding.
    assert sent(wire, framed(good, flag=1), grpc_encoding="br")[0] == INTERNAL


@pytest.mark.parametrize("wbits", [31, 15], ids=["gzip", "deflate"])
def test_a_bomb_is_refused_before_it_is_unpacked(wire: Wire, wbits: int) -> None:
    """Kilobytes that unpack to a hundred megabytes and more are refused: unpacked size is limited to a
    multiple of the sent size.
    """
    packed = zlib.compressobj(9, zlib.DEFLATED, wbits)
    zeros = bytes(1 << 20)
    bomb = framed(b"".join(packed.compress(zeros) for _ in range(160)) + packed.flush(), flag=1)
    assert len(bomb) < 170_000
    before = wire.figures()["memory_kb"]
    with connect(wire) as connection:
        call = connection.begin(headers_of(grpc_encoding="gzip" if wbits == 31 else "deflate"))
        connection.send_all(call, bomb)
        connection.await_answers([call])
        answer = connection.answers[call]
    assert answer.grpc_status == INVALID_ARGUMENT, answer
    assert "unpacks to more than" in answer.message
    assert wire.figures()["memory_kb"] - before < (MAX_MESSAGE_BYTES >> 10) + 32 * 1024


@pytest.mark.parametrize(("count", "value"), [(10_000, b"value"), (1000, b"v" * 1000)], ids=["many", "long"])
def test_ten_thousand_headers(wire: Wire, count: int, value: bytes) -> None:
    """Core accepts or refuses them; either way they cost no more than their own size, while they last."""
    before = wire.figures()["memory_kb"]
    headers = headers_of() + [(b"x-%d" % number, value) for number in range(count)]
    with connect(wire) as connection:
        answer = called(connection, headers, framed(GOOD))
        assert answer.grpc_status in (OK, RESOURCE_EXHAUSTED), answer
        assert called(connection, headers_of(), framed(GOOD)).grpc_status == OK
    assert wire.figures()["memory_kb"] - before < 64 * 1024


@pytest.mark.parametrize(
    ("changed", "allowed"),
    [
        ({"content_type": None}, {OK, UNIMPLEMENTED, INTERNAL}),
        ({"content_type": "text/html"}, {OK, UNIMPLEMENTED, INTERNAL}),
        ({"te": None}, {OK, INTERNAL}),
        ({"method": "GET"}, {OK, UNIMPLEMENTED, INTERNAL}),
        ({"method": "DELETE"}, {INTERNAL}),
        ({"path": "/"}, {UNIMPLEMENTED}),
        ({"path": None}, {UNIMPLEMENTED, INTERNAL}),
        ({"path": "/inference.GRPCInferenceService/Nothing"}, {UNIMPLEMENTED}),
        ({"path": "/" + "x" * 6000}, {UNIMPLEMENTED, RESOURCE_EXHAUSTED}),
        ({"grpc_timeout": "soon"}, {INTERNAL, OK, DEADLINE_EXCEEDED}),
        ({"grpc_timeout": "-5S"}, {INTERNAL, OK, DEADLINE_EXCEEDED}),
        # Core rounds up to a millisecond, in which a fast server answers.
        ({"grpc_timeout": "1n"}, {OK, DEADLINE_EXCEEDED}),
        ({"grpc_timeout": "99999999H"}, {OK}),
        ({"x_text_bin": "!not base64!"}, {INTERNAL}),
        ({"tensorferry_stream_order": "x"}, {OK}),
    ],
)
def test_headers_that_are_wrong(wire: Wire, changed: Any, allowed: set[int]) -> None:
    status, message = sent(wire, framed(GOOD), **changed)
    # None: core reset the call.
    assert status is None or status in allowed, message
    assert "internal error" not in message


def test_a_deadline_that_passes_before_the_message_is_complete(wire: Wire) -> None:
    with connect(wire) as connection:
        call = connection.begin(headers_of(grpc_timeout="1n"))
        connection.send(call, framed(GOOD)[:-1])
        connection.flush()
        connection.await_answers([call])
        answer = connection.answers[call]
        # None: core reset the call.
        assert answer.grpc_status in (DEADLINE_EXCEEDED, None), answer


def test_header_values_that_are_not_text(wire: Wire) -> None:
    """Wrong headers are not logged, because any client could fill the log."""
    for name, value in (
        (b"x-text", b"\xff\xfe"),
        (b":path", b"/\xff\xfe/\x80"),
        (b"traceparent", b"\xe9"),
        (b"grpc-encoding", b"br"),
        (b"te", b"gzip"),
        (b"x-data-bin", b"!"),
    ):
        with connect(wire) as connection:
            others = [header for header in headers_of() if header[0] != name]
            answer = called(connection, [*others, (name, value)], framed(GOOD))
            assert answer.grpc_status in (OK, UNIMPLEMENTED, INTERNAL, None), answer
            assert "internal error" not in answer.message
    assert not [line for line in wire.server.log if json.loads(line)["level"] not in ("info", "warning")]
