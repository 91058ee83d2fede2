"""Clients that do not read, do not finish sending, or open ever more: the memory kept for them is
bounded.
"""

from __future__ import annotations

from collections.abc import Sequence

import hpack
import numpy as np
import pytest
from fuzz.attackers.attacks import DATA, GOOD, HEADERS, OK, PATIENCE, connect, frame
from fuzz.attackers.raw import Connection, framed, headers_of
from fuzz.attackers.wire import Wire
from support.server.rig import request

from tensorferry.server.transport.channel_args import WINDOW_BYTES

LARGE = framed(request({"x": np.zeros((4096, 3), np.float32)}, model="m").SerializeToString())
STREAMS = 8
# The window, the part of it that has been read, the stream's requests in flight, and the message in
# hand.
MOST_TAKEN = 3 * WINDOW_BYTES + 64 * len(LARGE)

pytestmark = pytest.mark.usefixtures("good_client")


def flood(connection: Connection, calls: Sequence[int], message: bytes) -> dict[int, int]:
    """Send messages of all these calls until the windows stay closed; return the bytes taken, by call.

    Each call gets a window first, however long that takes; a call without a new window soon after
    is full.
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


def test_many_slow_bodies_and_headers(wire: Wire) -> None:
    """Three hundred connections that send half a message or header, and no more."""
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
    """Other calls are answered beside calls that do not end. In the threaded transport each has one of
    512 threads.
    """
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
