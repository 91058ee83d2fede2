"""Attacks on HTTP/2 against real servers: a good client is answered meanwhile and after.

At the end the server's growth (memory, files, threads) and its log are checked.
"""

from __future__ import annotations

import contextlib
import struct
import threading

import h2.exceptions
import hpack
import pytest
from fuzz.attackers.attacks import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    GOAWAY,
    GOOD,
    HEADERS,
    PATIENCE,
    PING,
    PUSH,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    closed_by_server,
    connect,
    frame,
)
from fuzz.attackers.raw import Connection, framed, headers_of, say_no_more
from fuzz.attackers.wire import Wire
from polling import until

pytestmark = pytest.mark.usefixtures("good_client")


@pytest.mark.parametrize(
    "more",
    [
        # HPACK: an unindexed literal; an indexed one that is then repeated.
        b"\0\x01a\x7f\x81\x7e" + b"v" * 16256,
        b"\x40\x01a\x01b" + b"\xbe" * 16000,
        b"\x82" * 16000,
    ],
    ids=["long values", "ever the same", "pseudo-headers"],
)
def test_headers_that_never_end(wire: Wire, more: bytes) -> None:
    """CONTINUATION frames without end, 5 MB of them: core reads on, and stops keeping them."""
    before = wire.figures()["memory_kb"]
    with connect(wire) as connection:
        connection.write(frame(HEADERS, 0, 1, hpack.Encoder().encode(headers_of())))
        for _ in range(300):
            connection.write(frame(CONTINUATION, 0, 1, more))
            if connection.closed:
                break
        wire.check_good()
    # If every header were kept, one of the requests would take half a gigabyte.
    assert wire.figures()["memory_kb"] - before < 192 * 1024


def test_rapid_reset(wire: Wire) -> None:
    """CVE-2023-44487: calls that are reset as soon as they begin, hundreds at a time."""
    with connect(wire) as connection:
        for _ in range(2):
            for _ in range(300):
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
    """Five thousand frames of one kind, whose answers are not read."""
    before = wire.figures()["memory_kb"]
    with connect(wire) as connection:
        connection.socket.settimeout(0.5)
        for _ in range(5):
            try:
                connection.write(flood * 1000)
            except TimeoutError:
                # The server stops reading until its answers are read.
                break
            if connection.closed:
                break
        wire.check_good()
    assert wire.figures()["memory_kb"] - before < 32 * 1024


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
def test_other_protocols(wire: Wire, data: bytes) -> None:
    with Connection.raw(wire.server.address, PATIENCE) as bare:
        bare.sendall(data)
        say_no_more(bare)
        with contextlib.suppress(ConnectionResetError):
            while bare.recv(1 << 16):
                pass


def test_a_good_client_beside_attackers(wire: Wire) -> None:
    """Several attackers at once, beside a client that retries when the server is full."""
    over = threading.Event()

    def attack(number: int) -> None:
        # Bounded, so that a busy machine does not get more attacks than it has time for.
        for _ in range(30):
            if over.is_set():
                return
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
                # The server has closed this connection.
                pass

    attackers = [
        threading.Thread(target=attack, args=(number,), name=f"attacker-{number}") for number in range(3)
    ]
    for attacker in attackers:
        attacker.start()
    try:
        for _ in range(10):
            until(wire.answers_good)
    finally:
        over.set()
        for attacker in attackers:
            attacker.join(PATIENCE)
