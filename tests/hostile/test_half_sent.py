"""Limits of calls and connections also limit the memory of messages that are never completed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import h2.settings
import numpy as np
import pytest
from fuzz.attackers.raw import Connection, framed, headers_of
from polling import until
from support.processes.server import SERVER_PROCESSES, ServerProcess, running

from tensorferry.client import InferenceClient, Unavailable

PATIENCE = 60.0
CALLS, CONNECTIONS = 3, 4
MESSAGE_BYTES = 4 << 20
FLAGS = (
    "--max-calls-per-connection",
    str(CALLS),
    # Each process has its part of them.
    "--max-connections",
    str(CONNECTIONS * int(SERVER_PROCESSES or 1)),
    *("--max-message-bytes", str(MESSAGE_BYTES)),
)
# Everything but the last byte of a message.
INCOMPLETE = framed(b"\0" * (MESSAGE_BYTES - 1), length=MESSAGE_BYTES)
REFUSED_STREAM = 7


@pytest.fixture(scope="module")
def server(transport: str, echo_model: Path) -> Iterator[ServerProcess]:
    with running(f"m={echo_model}", *FLAGS, transport=transport) as server:
        yield server


def memory(server: ServerProcess) -> int:
    statuses = [Path(f"/proc/{pid}/status").read_text() for pid in server.processes()]
    return sum(int(status.split("VmRSS:")[1].split()[0]) << 10 for status in statuses)


def is_good(server: ServerProcess) -> bool:
    """Return whether a client is answered. The server may refuse it while it counts connections that are closed."""
    with InferenceClient(server.address) as client:
        rows = np.ones((1, 3), np.float32)
        try:
            return bool((client.infer("m", {"x": rows})["y"] == rows).all())
        except Unavailable:
            return False


def connected(server: ServerProcess) -> Connection | None:
    """Open a connection; None if the server closes it, because it counts others that are closed."""
    connection = Connection(server.address, PATIENCE)
    connection.ping()
    if connection.closed:
        connection.socket.close()
        return None
    return connection


def send_incomplete(connection: Connection) -> None:
    """Send the incomplete message on each open call, within the server's flow control."""
    left = {call: len(INCOMPLETE) for call, answer in connection.answers.items() if not answer.ended}
    while any(left.values()):
        for call in left:
            room = min(connection.h2.local_flow_control_window(call), left[call])
            if room > 0:
                connection.send(call, INCOMPLETE[-left[call] :][:room])
                left[call] -= room
        connection.flush()
        if any(left.values()):
            connection.read()
    connection.ping()


@pytest.mark.parametrize("method", ["ModelInfer", "ModelMetadata"])
def test_the_memory_of_incomplete_messages_is_limited(server: ServerProcess, method: str) -> None:
    until(lambda: is_good(server))
    before = memory(server)
    with ExitStack() as stack:
        for _ in range(CONNECTIONS - 1):
            connection = until(lambda: connected(server))
            assert connection is not None
            stack.enter_context(connection)
            # A client that ignores the server's limit of concurrent streams.
            connection.h2.remote_settings[h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS] = 1000
            connection.h2.remote_settings.acknowledge()
            for _ in range(4 * CALLS):
                connection.begin(headers_of(method))
            connection.flush()
            connection.ping()
            resets = [answer.reset for answer in connection.answers.values()]
            assert resets == [None] * CALLS + [REFUSED_STREAM] * 3 * CALLS
            send_incomplete(connection)
        most = (CONNECTIONS - 1) * CALLS * MESSAGE_BYTES
        # The slices of gRPC's core are not full, and malloc keeps some memory.
        assert memory(server) - before < 1.5 * most
        until(lambda: is_good(server))
    until(lambda: is_good(server))
