"""Shared parts of attacks: connections, frames and calls that no library makes, and their expected
status codes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
from fuzz.attackers.raw import Answer, Connection, Header, headers_of
from fuzz.attackers.wire import Wire
from support.server.rig import request

PATIENCE = 30.0
OK, INVALID_ARGUMENT, DEADLINE_EXCEEDED, NOT_FOUND, RESOURCE_EXHAUSTED, UNIMPLEMENTED, INTERNAL = (
    0, 3, 4, 5, 8, 12, 13,
)  # fmt: skip
MAX_MESSAGE_BYTES = 64 << 20
GOOD = request({"x": np.zeros((1, 3), np.float32)}, model="m", id="raw").SerializeToString()


def connect(wire: Wire) -> Connection:
    return Connection(wire.server.address, PATIENCE)


def frame(kind: int, flags: int, call: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, call) + payload


DATA, HEADERS, RST_STREAM, SETTINGS, PUSH, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = (
    0, 1, 3, 4, 5, 6, 7, 8, 9,
)  # fmt: skip
END_STREAM, END_HEADERS = 1, 4


def sent(wire: Wire, data: bytes, **changed: str | None) -> tuple[int | None, str]:
    """Return status and message of one call with this body."""
    with connect(wire) as connection:
        answer = called(connection, headers_of("ModelInfer", **changed), data)
        return answer.grpc_status, answer.message


def called(connection: Connection, headers: Sequence[Header], data: bytes) -> Answer:
    """Return the answer to a call with this body."""
    call = connection.begin(headers, last=not data)
    if data:
        connection.send(call, data, last=True)
    connection.flush()
    connection.await_answers([call])
    return connection.answers[call]


def closed_by_server(connection: Connection) -> bool:
    """Read until the server closes the connection; raise TimeoutError if it does not."""
    while connection.read():
        pass
    return connection.closed
