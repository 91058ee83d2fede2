"""Limits of requests and clients on a real server, over both transports: statuses and messages beyond
them.
"""

from __future__ import annotations

import math
import socket
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from e2e.fixtures import Serve
from support.processes.probe import OpenStream, request, stub_of
from support.processes.server import SERVER_PROCESSES
from support.server.tokens import bearer, line

from tensorferry.protos import inference_pb2 as pb

INVALID, EXHAUSTED = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED
PATIENCE = 60


class Refusal(NamedTuple):
    """Status of a call, and its retry time in milliseconds, 0 for none."""

    code: grpc.StatusCode
    details: str
    pushback: int


def refusal(address: str, message: pb.ModelInferRequest, **options: Any) -> Refusal:
    with stub_of(address) as stub, pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(message, timeout=PATIENCE, **options)
    error: Any = caught.value
    trailers = dict(error.trailing_metadata() or ())
    return Refusal(error.code(), error.details(), int(trailers.get("grpc-retry-pushback-ms", 0)))


def test_one_request(serve: Serve, probe_model: Path) -> None:
    """A request that can never pass is INVALID_ARGUMENT, with the received and the allowed value; the
    next is served. Core refuses metadata and messages that are too long.
    """
    rows = ("--max-request-rows", "2", "--max-batch-size", "4")
    server = serve(probe_model, *rows, "--max-metadata-bytes", "4096", "--max-message-bytes", "256KiB")
    many = request(1)
    for _ in range(5000):
        many.inputs.add(name="x")
    long, longer = request(1), request(1)
    long.parameters["note"].string_param = "x" * 100_000
    longer.parameters["note"].string_param = "x" * 300_000
    for message, code, words in (
        (request(1, rows=3), INVALID, "has 3 rows; this server takes at most 2"),
        (many, INVALID, "has more than 4096 entries in inputs, which is the most"),
        (long, INVALID, "has 100000 bytes; this server takes at most 65536"),
        (longer, EXHAUSTED, "larger than max"),
    ):
        error = refusal(server.address, message)
        assert error.code is code
        assert words in error.details
    assert refusal(server.address, request(1), metadata=(("note", "x" * 5000),)).code is EXHAUSTED
    with stub_of(server.address) as stub:
        metadata = (("note", "x" * 3000),)
        assert stub.ModelInfer(request(1, rows=2), timeout=PATIENCE, metadata=metadata).id == "1"


def test_connections(serve: Serve, probe_model: Path) -> None:
    """Connections too many are closed; once another closes there is room. Each process has its part of the limit."""
    server = serve(probe_model, "--max-connections", "2")
    host, port = server.address.rsplit(":", 1)
    processes = int(SERVER_PROCESSES or 1)
    # With 40 for each process, each gets more than its part.
    connections = [socket.create_connection((host, int(port)), PATIENCE) for _ in range(40 * processes)]
    assert sum(map(is_served, connections)) == processes * math.ceil(2 / processes)
    for connection in connections:
        connection.close()
    with stub_of(server.address) as stub:
        assert stub.ServerLive(pb.ServerLiveRequest(), timeout=PATIENCE, wait_for_ready=True).live


def is_served(connection: socket.socket) -> bool:
    """Whether the server sends its settings, instead of closing the connection at once."""
    connection.settimeout(PATIENCE)
    try:
        return connection.recv(9) != b""
    except ConnectionResetError:
        return False


def test_a_client_has_its_part_and_others_theirs(serve: Serve, probe_model: Path, tmp_path: Path) -> None:
    """Clients are distinguished by token: one at its limit is refused with a retry time, the other is
    served.
    """
    file = tmp_path / "tokens"
    file.write_text("".join(line(name, "infer", f"token-of-{name}") for name in ("alice", "bob")))
    file.chmod(0o600)
    # So low a rate that no pause of this test gives a client another row.
    server = serve(probe_model, "--auth-tokens", file, "--client-rate", "0.01")
    metadata = {name: bearer(f"token-of-{name}") for name in ("alice", "bob")}
    with stub_of(server.address) as stub:
        stub.ModelInfer(request(1), timeout=PATIENCE, metadata=metadata["alice"])
        error = refusal(server.address, request(2), metadata=metadata["alice"])
        assert error.code is EXHAUSTED
        assert "client 'alice' sends more than 0.01 rows a second" in error.details
        assert 0 < error.pushback <= 100_000
        stub.ModelInfer(request(3), timeout=PATIENCE, metadata=metadata["bob"])
    error = refusal(server.address, request(4, rows=2), metadata=metadata["bob"])
    assert error.code is INVALID


def test_anonymous_clients_are_distinguished_by_address(serve: Serve, probe_model: Path) -> None:
    server = serve(probe_model, "--client-rate", "0.01")
    with stub_of(server.address) as stub:
        stub.ModelInfer(request(1), timeout=PATIENCE)
    error = refusal(server.address, request(2))
    assert error.code is EXHAUSTED
    assert "client '127.0.0.1'" in error.details
    assert error.pushback > 50_000
    stream_error(server.address)


def stream_error(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        stream = OpenStream(channel)
        stream.send(request(3))
        answer = stream.answers["3"]
        assert "client '127.0.0.1' sends more" in answer.error_message
        assert answer.infer_response.parameters["tensorferry_status"].string_param == EXHAUSTED.name
        stream.cancel()
