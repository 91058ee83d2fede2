"""Unread responses are limited in bytes, and other clients are not rejected because of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fuzz.attackers.attacks import RESOURCE_EXHAUSTED
from fuzz.attackers.raw import Connection, framed, headers_of
from polling import until
from support.processes.metrics import scrape
from support.processes.server import SERVER_PROCESSES, ServerProcess, running
from support.server.rig import request

from tensorferry.client import InferenceClient
from tensorferry.server.transport.channel_args import WINDOW_BYTES

PATIENCE = 60.0
# A connection can hold 4 MiB of the 16 MiB that each process has; a stream is read only below 1 MiB.
FLAGS = ("--max-unsent-bytes", f"{16 * int(SERVER_PROCESSES or 1)}MiB", "--metrics-port", "0")
COLUMNS = 400_000
ROW_BYTES, MAX_CONNECTION_BYTES = 4 * COLUMNS, 4 << 20
LARGE = framed(request({"x": np.zeros((1, COLUMNS), np.float32)}, model="m").SerializeToString())
# Two responses of 1.6 MB fit into the 4 MiB of a connection.
HELD = 2
CALLS = 8


@pytest.fixture(scope="module")
def server(transport: str, echo_model: Path) -> Iterator[ServerProcess]:
    with running(f"m={echo_model}", *FLAGS, transport=transport) as server:
        yield server


def unsent(server: ServerProcess) -> int:
    return int(scrape(server)["tensorferry_unsent_answer_bytes"])


def is_good(server: ServerProcess) -> bool:
    with InferenceClient(server.address) as client:
        answer = client.infer("m", {"x": np.ones((1, COLUMNS), np.float32)})
        return bool((answer["y"] == 1).all())


def test_unread_unary_responses_are_limited(server: ServerProcess) -> None:
    for _ in range(2):
        # Twice, because a closed connection must release its bytes.
        with Connection(server.address, PATIENCE, window=0) as connection:
            for _ in range(CALLS):
                connection.send_all(connection.begin(headers_of()), LARGE)
            answers = connection.answers.values()
            while sum(answer.ended for answer in answers) < CALLS - HELD:
                connection.read()
            ended = [answer for answer in answers if answer.ended]
            assert {answer.grpc_status for answer in ended} == {RESOURCE_EXHAUSTED}
            assert all("to this connection wait to be read, of at most 4194304" in a.message for a in ended)
            assert len(ended) == CALLS - HELD
            assert HELD * ROW_BYTES < unsent(server) < MAX_CONNECTION_BYTES
            late = connection.begin(headers_of())
            connection.flush()
            if server.ready["transport"] == "threaded":
                # The lane refuses the call before its message is read; grpcio reads it first.
                connection.send_all(late, framed(b""))
            connection.await_answers([late])
            assert connection.answers[late].grpc_status == RESOURCE_EXHAUSTED
            assert is_good(server)
        assert until(lambda: unsent(server) == 0)


def test_a_stream_with_unread_responses_is_not_read_further(server: ServerProcess) -> None:
    """Only a few of its requests are in flight; flow control holds back the others."""
    with Connection(server.address, PATIENCE, window=0) as connection:
        call = connection.begin(headers_of("ModelStreamInfer"))
        sent = 0
        connection.flush()
        try:
            # The bytes in flight, those of the next message, and twice the window, because part of it has been read.
            while sent < 8 * len(LARGE) + 2 * WINDOW_BYTES:
                room = min(connection.h2.local_flow_control_window(call), len(LARGE) - sent % len(LARGE))
                if room:
                    connection.send(call, LARGE[sent % len(LARGE) :][:room])
                    connection.flush()
                    sent += room
                else:
                    connection.socket.settimeout(2.0)
                    connection.read()
        except TimeoutError:
            # The server makes no more room.
            pass
        assert sent < 4 * len(LARGE) + 2 * WINDOW_BYTES
        assert until(lambda: is_good(server))
