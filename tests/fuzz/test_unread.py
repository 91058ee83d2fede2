"""Clients that do not read, do not finish sending, or open ever more: the memory kept for them is
bounded.
"""

from __future__ import annotations

import hpack
import pytest
from fuzz.attackers.attacks import DATA, GOOD, HEADERS, OK, connect, frame
from fuzz.attackers.raw import framed, headers_of
from fuzz.attackers.wire import Wire

pytestmark = pytest.mark.usefixtures("good_client")


def test_many_slow_bodies_and_headers(wire: Wire) -> None:
    """A hundred connections that send half a message or header, and no more."""
    slow = [connect(wire) for _ in range(100)]
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
        for _ in range(5):
            wire.check_good()
    finally:
        for connection in slow:
            connection.socket.close()


def test_many_streams_on_one_connection(wire: Wire) -> None:
    """Other calls are answered beside calls that do not end. In the threaded transport each has one of
    512 threads.
    """
    count = 1000 if wire.server.ready["transport"] == "lane" else 400
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
