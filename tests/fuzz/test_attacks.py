"""Attacks on HTTP/2 and on gRPC's framing, against real servers: a good client is answered meanwhile and after.

What a server has more than before (memory, files, threads) and what it logged is held once all are over.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from typing import Any

import grpc
import h2.exceptions
import hpack
import numpy as np
import pytest
from fuzz.raw import PREFIX, Connection, framed, headers_of, say_no_more
from fuzz.wire import Wire
from server.rig import request

from tensorferry.protos import inference_pb2 as pb

PATIENCE = 30.0
OK, INVALID_ARGUMENT, DEADLINE_EXCEEDED, NOT_FOUND, RESOURCE_EXHAUSTED, UNIMPLEMENTED, INTERNAL = (
    0,
    3,
    4,
    5,
    8,
    12,
    13,
)
MAX_MESSAGE_BYTES = 64 << 20
# More than is ever taken of a stream whose answers wait.
UNREAD_BYTES = 512 << 20
GOOD = request({"x": np.zeros((1, 3), np.float32)}, model="m", id="raw").SerializeToString()


@pytest.fixture(scope="module")
def wire(transport: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    """A server that all tests of a transport attack."""
    made = Wire(tmp_path_factory.mktemp("attacked"), transport)
    try:
        yield made
        # malloc keeps some of what the largest messages took.
        made.close(more_memory_kb=4 * MAX_MESSAGE_BYTES >> 10)
    finally:
        made.server.stop()


@pytest.fixture(autouse=True)
def good_client(wire: Wire) -> Iterator[None]:
    """Is answered before and after each attack."""
    wire.check_good()
    yield
    wire.check_good()
    assert wire.server.process.poll() is None
    assert not wire.server.errors()


def connect(wire: Wire, **options: int) -> Connection:
    return Connection(wire.server.address, PATIENCE, **options)


def frame(kind: int, flags: int, call: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, call) + payload


DATA, HEADERS, RST_STREAM, SETTINGS, PUSH, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = (
    0,
    1,
    3,
    4,
    5,
    6,
    7,
    8,
    9,
)
END_STREAM, END_HEADERS = 1, 4


def sent(wire: Wire, data: bytes, **changed: str | None) -> tuple[int | None, str]:
    """Status and message of one call with this body."""
    with connect(wire) as connection:
        call = connection.begin(headers_of("ModelInfer", **changed), last=not data)
        if data:
            connection.send(call, data, last=True)
        connection.flush()
        connection.await_answers([call])
        answer = connection.answers[call]
        return answer.grpc_status, answer.message


def closed_by_server(connection: Connection) -> bool:
    """Reads until the server ends the connection; TimeoutError if it does not."""
    while connection.read():
        pass
    return connection.closed


@pytest.mark.parametrize(
    ("data", "allowed"),
    [
        (framed(GOOD, length=1 << 31), RESOURCE_EXHAUSTED),
        (framed(GOOD, length=(1 << 32) - 1), RESOURCE_EXHAUSTED),
        (framed(GOOD, length=MAX_MESSAGE_BYTES + 1), RESOURCE_EXHAUSTED),
        # A message that does not come is none.
        (framed(GOOD, length=len(GOOD) + 1), UNIMPLEMENTED),
        (framed(GOOD)[:3], UNIMPLEMENTED),
        (b"", UNIMPLEMENTED),
        (framed(GOOD, length=len(GOOD) - 1), INVALID_ARGUMENT),
        (framed(b"\xff" * 100), INVALID_ARGUMENT),
        (framed(GOOD, flag=1), INTERNAL),
        # Core takes a flag that there is not for an empty message.
        (framed(GOOD, flag=4), NOT_FOUND),
    ],
)
def test_a_prefix_that_lies(wire: Wire, data: bytes, allowed: int) -> None:
    status, message = sent(wire, data)
    assert status == allowed, message
    assert "internal error" not in message


@pytest.mark.parametrize("method", ["ModelStreamInfer", "ServerLive", "ModelMetadata"])
def test_a_prefix_that_lies_to_other_methods(wire: Wire, method: str) -> None:
    for data in (
        framed(GOOD, length=1 << 31),
        framed(GOOD, flag=1),
        framed(GOOD, length=len(GOOD) + 9),
        b"\0\0",
    ):
        status, message = sent(wire, data, path=PREFIX + method)
        # A stream whose last message does not come ends as if it had not been begun.
        assert status in (OK, RESOURCE_EXHAUSTED, INTERNAL, UNIMPLEMENTED), message
        assert "internal error" not in message


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_compressed_garbage(wire: Wire, encoding: str) -> None:
    status, message = sent(wire, framed(b"no zip at all" * 9, flag=1), grpc_encoding=encoding)
    assert status == INTERNAL, message
    assert "internal error" not in message
    good = gzip.compress(GOOD) if encoding == "gzip" else zlib.compress(GOOD)
    assert sent(wire, framed(good, flag=1), grpc_encoding=encoding)[0] == OK
    assert sent(wire, framed(good[:-9], flag=1), grpc_encoding=encoding)[0] in (INTERNAL, INVALID_ARGUMENT)
    # Core's word for an encoding that there is not.
    assert sent(wire, framed(good, flag=1), grpc_encoding="br")[0] == INTERNAL


@pytest.mark.parametrize("wbits", [31, 15], ids=["gzip", "deflate"])
def test_a_bomb_is_refused_before_it_is_there(wire: Wire, wbits: int) -> None:
    """Kilobytes that would be a hundred megabytes and more: the limit is of what messages are when they are unpacked."""
    packed = zlib.compressobj(9, zlib.DEFLATED, wbits)
    zeros = bytes(1 << 20)
    bomb = framed(b"".join(packed.compress(zeros) for _ in range(160)) + packed.flush(), flag=1)
    assert len(bomb) < 170_000
    before = wire.figures()["memory_kb"]
    with connect(wire) as connection:
        call = connection.begin(headers_of(grpc_encoding="gzip" if wbits == 31 else "deflate"))
        answer = connection.answers[call]
        at = 0
        while at < len(bomb) and not answer.ended:
            room = min(connection.h2.local_flow_control_window(call), connection.h2.max_outbound_frame_size)
            if room:
                connection.h2.send_data(call, bomb[at : at + room], end_stream=at + room >= len(bomb))
                at += room
                connection.flush()
            else:
                connection.read()
        connection.await_answers([call])
    assert answer.grpc_status == RESOURCE_EXHAUSTED, answer
    assert wire.figures()["memory_kb"] - before < (MAX_MESSAGE_BYTES >> 10) + 32 * 1024


@pytest.mark.parametrize(("count", "value"), [(10_000, b"value"), (1000, b"v" * 1000)], ids=["many", "long"])
def test_ten_thousand_headers(wire: Wire, count: int, value: bytes) -> None:
    """Core takes them in, or refuses them; either way they cost no more than their own size, and only then."""
    before = wire.figures()["memory_kb"]
    headers = headers_of() + [(b"x-%d" % number, value) for number in range(count)]
    with connect(wire) as connection:
        call = connection.begin(headers)
        connection.send(call, framed(GOOD), last=True)
        connection.flush()
        connection.await_answers([call])
        answer = connection.answers[call]
        assert answer.grpc_status in (OK, RESOURCE_EXHAUSTED), answer
        again = connection.begin(headers_of())
        connection.send(again, framed(GOOD), last=True)
        connection.flush()
        connection.await_answers([again])
        assert connection.answers[again].grpc_status == OK
    assert wire.figures()["memory_kb"] - before < 64 * 1024


@pytest.mark.parametrize(
    "more",
    [
        # HPACK: a literal that is not indexed; one that is, and then again and again.
        b"\0\x01a\x7f\x81\x7e" + b"v" * 16256,
        b"\x40\x01a\x01b" + b"\xbe" * 16000,
        b"\x82" * 16000,
    ],
    ids=["long values", "ever the same", "pseudo-headers"],
)
def test_headers_that_never_end(wire: Wire, more: bytes) -> None:
    """CONTINUATION upon CONTINUATION, 10 MB of them: core reads on, and stops keeping them."""
    before = wire.figures()["memory_kb"]
    with connect(wire) as connection:
        connection.write(frame(HEADERS, 0, 1, hpack.Encoder().encode(headers_of())))
        for _ in range(600):
            connection.write(frame(CONTINUATION, 0, 1, more))
            if connection.closed:
                break
        wire.check_good()
    # One of the headers that were never ended would be a gigabyte if each were kept.
    assert wire.figures()["memory_kb"] - before < 192 * 1024


def test_rapid_reset(wire: Wire) -> None:
    """CVE-2023-44487: calls that are reset as soon as they are begun, hundreds at a time."""
    with connect(wire) as connection:
        for _ in range(4):
            for _ in range(500):
                call = connection.begin(headers_of())
                connection.send(call, framed(GOOD), last=True)
                connection.h2.reset_stream(call)
            connection.flush()
            wire.check_good()
            connection.socket.settimeout(0.001)
            with contextlib.suppress(TimeoutError):
                connection.read()
            connection.socket.settimeout(PATIENCE)
            if connection.closed or connection.goaway is not None:
                break


@pytest.mark.parametrize(
    "flood",
    [
        frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 65535)),
        frame(PING, 0, 0, b"8 bytes!"),
        frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 1)),
        frame(2, 0, 99, struct.pack(">IB", 1, 1)),
        frame(11, 0, 0, b"unknown kind"),
        frame(DATA, 0, 0),
        frame(RST_STREAM, 0, 0, struct.pack(">I", 8)),
        frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 0)),
        frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", (1 << 31) - 1)),
        frame(PUSH, END_HEADERS, 1, struct.pack(">I", 2)),
        frame(GOAWAY, 0, 0, struct.pack(">II", 0, 0)),
        frame(HEADERS, END_HEADERS, 0, b"\x82"),
        frame(HEADERS, END_HEADERS, 1, b"\xff" * 30),
        frame(CONTINUATION, END_HEADERS, 1, b""),
        frame(PING, 0, 0, b"short"),
        frame(SETTINGS, 0, 0, b"odd"),
    ],
    ids=lambda flood: f"{flood[3]}-{flood[9:17].hex()}",
)
def test_floods_of_frames(wire: Wire, flood: bytes) -> None:
    """Twenty thousand of a frame, whose answers nobody reads."""
    before = wire.figures()["memory_kb"]
    with connect(wire) as connection:
        connection.socket.settimeout(0.5)
        for _ in range(20):
            try:
                connection.write(flood * 1000)
            except TimeoutError:
                # It reads no more until its answers are read.
                break
            if connection.closed:
                break
        wire.check_good()
    assert wire.figures()["memory_kb"] - before < 32 * 1024


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
def test_answers_that_nobody_reads(wire: Wire, method: str) -> None:
    """Windows of nothing: what cannot be sent keeps neither a worker nor more than its own memory."""
    rows = np.zeros((1, 3), np.float32)
    message = request({"x": np.tile(rows, (32, 1))}, model="m").SerializeToString()
    before = wire.figures()
    with connect(wire, window=0) as connection:
        for _ in range(100):
            call = connection.begin(headers_of(method))
            connection.send(call, framed(message), last=True)
        connection.flush()
        connection.ping()
        for _ in range(20):
            wire.check_good()
        assert wire.figures()["memory_kb"] - before["memory_kb"] < 16 * 1024


def flood(connection: Connection, call: int, message: bytes) -> int:
    """Sends messages until no more room is made for them, or beyond all measure; the bytes that were taken."""
    taken = 0
    connection.socket.settimeout(0.5)
    try:
        while taken < UNREAD_BYTES:
            while connection.h2.local_flow_control_window(call) >= len(message):
                connection.send(call, message)
                taken += len(message)
            connection.flush()
            connection.read()
    except TimeoutError:
        pass
    return taken


def test_a_stream_whose_answers_nobody_reads_is_not_read_any_further(wire: Wire) -> None:
    message = framed(request({"x": np.zeros((4096, 3), np.float32)}, model="m").SerializeToString())
    with connect(wire, window=0) as connection:
        call = connection.begin(headers_of("ModelStreamInfer"))
        connection.flush()
        # Core makes as much room as it thinks that a fast connection needs: 8 to 64 MB were seen.
        assert len(message) < flood(connection, call, message) < UNREAD_BYTES
        wire.check_good()


def test_many_slow_bodies_and_headers(wire: Wire) -> None:
    """Three hundred connections that say half of something, and no more."""
    slow = [connect(wire) for _ in range(300)]
    try:
        for number, connection in enumerate(slow):
            if number % 3 == 0:
                call = connection.begin(headers_of())
                connection.send(call, framed(GOOD)[:-1])
                connection.flush()
            elif number % 3 == 1:
                connection.write(frame(HEADERS, 0, 1, hpack.Encoder().encode(headers_of())))
            else:
                connection.write(frame(DATA, 0, 1, GOOD)[:7])
        for _ in range(20):
            wire.check_good()
    finally:
        for connection in slow:
            connection.socket.close()


def test_many_streams_on_one_connection(wire: Wire) -> None:
    """Calls that have not ended: others are answered. In the threaded transport each has a thread, of 512."""
    count = 2000 if wire.server.ready["transport"] == "lane" else 400
    with connect(wire) as connection:
        for _ in range(count):
            connection.begin(headers_of())
        connection.flush()
        connection.ping()
        for _ in range(5):
            wire.check_good()
        # Each may still become a good call.
        call = next(iter(connection.answers))
        connection.send(call, framed(GOOD), last=True)
        connection.flush()
        connection.await_answers([call])
        assert connection.answers[call].grpc_status == OK


def test_half_closed_connections(wire: Wire) -> None:
    for at in (0, 5, 24, 40, 80):
        with connect(wire) as connection:
            call = connection.begin(headers_of())
            connection.send(call, framed(GOOD), last=True)
            data = connection.h2.data_to_send()
            connection.write(data[:at])
            say_no_more(connection.socket)
            assert closed_by_server(connection)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST /inference.GRPCInferenceService/ModelInfer HTTP/1.1\r\nContent-Length: 9999999999\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\xab" * 500,
        b"\0" * 1000,
        b"\xff" * 1000,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 100,
        b"PRI * HTTP/1.0\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.9\r\n",
    ],
    ids=["http1", "http1 post", "tls", "zeros", "ones", "after the preface", "half a preface", "ssh"],
)
def test_what_is_not_http2(wire: Wire, data: bytes) -> None:
    with Connection.raw(wire.server.address, PATIENCE) as bare:
        bare.sendall(data)
        say_no_more(bare)
        with contextlib.suppress(ConnectionResetError):
            while bare.recv(1 << 16):
                pass


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
        ({"grpc_timeout": "1n"}, {DEADLINE_EXCEEDED}),
        ({"grpc_timeout": "99999999H"}, {OK}),
        ({"x_text_bin": "!not base64!"}, {INTERNAL}),
        ({"tensorferry_stream_order": "x"}, {OK}),
    ],
)
def test_headers_that_are_wrong(wire: Wire, changed: Any, allowed: set[int]) -> None:
    status, message = sent(wire, framed(GOOD), **changed)
    # None: core ended the call by a reset.
    assert status is None or status in allowed, message
    assert "internal error" not in message


def test_bytes_that_are_no_text_in_headers(wire: Wire) -> None:
    """They are not logged, nor is anything else that is wrong with headers: any client could fill the log."""
    for name, value in (
        (b"x-text", b"\xff\xfe"),
        (b":path", b"/\xff\xfe/\x80"),
        (b"traceparent", b"\xe9"),
        (b"grpc-encoding", b"br"),
        (b"te", b"gzip"),
        (b"x-data-bin", b"!"),
    ):
        with connect(wire) as connection:
            call = connection.begin(
                [*(header for header in headers_of() if header[0] != name), (name, value)]
            )
            connection.send(call, framed(GOOD), last=True)
            connection.flush()
            connection.await_answers([call])
            answer = connection.answers[call]
            assert answer.grpc_status in (OK, UNIMPLEMENTED, INTERNAL, None), answer
            assert "internal error" not in answer.message
    assert not [line for line in wire.server.log if json.loads(line)["level"] not in ("info", "warning")]


def test_a_good_client_amid_attackers(wire: Wire) -> None:
    """Threads that do the worst of the above, all at once, beside calls whose time is taken."""
    over = threading.Event()

    def attack(number: int) -> None:
        while not over.is_set():
            try:
                with connect(wire) as connection:
                    for _ in range(50):
                        call = connection.begin(headers_of())
                        connection.send(call, framed(GOOD, length=len(GOOD) + number), last=True)
                        if number % 2:
                            connection.reset(call)
                    connection.flush()
                    connection.ping()
            except (OSError, h2.exceptions.ProtocolError):
                # The server has had enough of this connection.
                pass

    attackers = [
        threading.Thread(target=attack, args=(number,), name=f"attacker-{number}") for number in range(3)
    ]
    for attacker in attackers:
        attacker.start()
    try:
        with grpc.insecure_channel(wire.server.address) as channel:
            infer: Any = channel.unary_unary(PREFIX + "ModelInfer")
            began = time.monotonic()
            for _ in range(30):
                assert pb.ModelInferResponse.FromString(infer(GOOD, timeout=PATIENCE)).id == "raw"
            assert time.monotonic() - began < PATIENCE
    finally:
        over.set()
        for attacker in attackers:
            attacker.join(PATIENCE)
