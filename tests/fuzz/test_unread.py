"""Clients that do not read, do not send what they began, or begin more and more: what is kept for them is bounded."""

from __future__ import annotations

from collections.abc import Sequence

import hpack
import numpy as np
import pytest
from fuzz.attackers.attacks import (
    DATA,
    GOOD,
    HEADERS,
    OK,
    PATIENCE,
    connect,
    frame,
)
from fuzz.attackers.raw import Connection, framed, headers_of
from fuzz.attackers.wire import Wire
from polling import until
from support.server.rig import request

from tensorferry.server.transport.channel_args import WINDOW_BYTES

LARGE = framed(request({"x": np.zeros((4096, 3), np.float32)}, model="m").SerializeToString())
STREAMS = 8
# The window, once more what has been read of it, what is in flight of a stream, and what is in hand.
MOST_TAKEN = 3 * WINDOW_BYTES + 64 * len(LARGE)

pytestmark = pytest.mark.usefixtures("good_client")


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


def flood(connection: Connection, calls: Sequence[int], message: bytes) -> dict[int, int]:
    """Sends messages of all these calls until no more room is made for them; by call, the bytes that were taken.

    Each has a window, however long that takes; who then makes no more room soon has none.
    """
    taken = dict.fromkeys(calls, 0)
    while max(taken.values()) < 2 * MOST_TAKEN:
        for call in calls:
            while connection.h2.local_flow_control_window(call) >= len(message):
                connection.send(call, message)
                taken[call] += len(message)
                connection.flush()
        waiting = min(taken.values()) <= WINDOW_BYTES - len(message)
        connection.socket.settimeout(PATIENCE if waiting else 0.5)
        try:
            connection.read()
        except TimeoutError:
            assert not waiting, taken
            break
    return taken


def test_streams_whose_answers_nobody_reads_are_not_read_any_further(wire: Wire) -> None:
    """Neither the client's connection nor the kernel's buffers say how much of each is taken and kept."""
    before = wire.figures()["memory_kb"]
    with connect(wire, window=0) as connection:
        calls = [connection.begin(headers_of("ModelStreamInfer")) for _ in range(STREAMS)]
        connection.flush()
        taken = flood(connection, calls, LARGE)
        grown = wire.figures()["memory_kb"] - before
        print(f"taken of each: {[number >> 10 for number in taken.values()]} KB; {grown} KB of memory more")
        assert max(taken.values()) < MOST_TAKEN
        assert grown << 10 < STREAMS * MOST_TAKEN
        # What was taken may yet have to be run, a full queue at a time.
        until(wire.answers_good)


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
