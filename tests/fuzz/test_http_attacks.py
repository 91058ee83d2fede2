"""Attacks on the HTTP port of a real server: good clients of both ports are answered meanwhile, and nothing is left after."""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from fuzz.attackers.raw import abort
from fuzz.attackers.wire import Wire
from polling import until
from support.server.http_rig import RawClient, post

INFER = "/v2/models/m/infer"
LINE = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: localhost\r\n"
# The time of a good request beside an attack, on a busy machine.
MOST_SECONDS = 20.0
LARGE = 1 << 20


class Attacked:
    """A server, and its HTTP port."""

    def __init__(self, directory: Path) -> None:
        self.wire = Wire(directory, "threaded", "--http-port", "0", "--max-unsent-bytes", str(64 << 20))
        self.port = urlsplit(self.wire.server.ready["http"]).port or 0

    def client(self) -> RawClient:
        return RawClient(self.port)

    def check_good(self) -> None:
        """Check that both ports answer rightly, in time."""
        began = time.monotonic()
        until(self.wire.answers_good)
        client = self.client()
        client.send(infer(1, data=[[1, 2, 3]]))
        assert client.read().json["outputs"][0]["data"] == [1.0, 2.0, 3.0]
        client.close()
        assert time.monotonic() - began < MOST_SECONDS


def infer(rows: int, **data: object) -> bytes:
    """A request with JSON, or with binary tensors both ways."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [rows, 3], **data}
    if data:
        return post(INFER, {"inputs": [tensor]})
    tensor["parameters"] = {"binary_data_size": 12 * rows}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    return post(INFER, head + bytes(12 * rows), Inference_Header_Content_Length=str(len(head)))


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    made = Attacked(tmp_path_factory.mktemp("attacked"))
    try:
        yield made
        # malloc keeps a part of the memory of the largest bodies.
        made.wire.close(more_memory_kb=384 << 10)
    finally:
        made.wire.server.stop()


@pytest.fixture
def good_client(attacked: Attacked) -> Iterator[None]:
    attacked.check_good()
    yield
    attacked.check_good()
    assert not attacked.wire.server.errors()


pytestmark = pytest.mark.usefixtures("good_client")


def reset(client: RawClient) -> None:
    abort(client.socket)
    client.close()


ONE_MIB = b"x" * LARGE
BODIES: dict[str, tuple[bytes, int]] = {
    "gzip-bomb": (post(INFER, gzip.compress(bytes(256 << 20)), Content_Encoding="gzip"), 413),
    "json-of-60-mib": (post(INFER, b'{"inputs":[' + b"[]," * (20 << 20) + b"0]}"), 400),
    "long-text": (post(INFER, b'{"id":"' + ONE_MIB * 60 + b'"}'), 400),
    "long-number": (post(INFER, b'{"inputs":[1.' + b"1" * (60 << 20) + b"]}"), 400),
    "endless-extension": (LINE + b"Transfer-Encoding: chunked\r\n\r\n1;" + ONE_MIB, 400),
    "endless-trailers": (LINE + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"a: b\r\n" * LARGE, 431),
}  # fmt: skip


@pytest.mark.parametrize(("data", "status"), BODIES.values(), ids=BODIES.keys())
def test_hostile_requests_are_refused(attacked: Attacked, data: bytes, status: int) -> None:
    client = attacked.client()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        client.send(data)
    with contextlib.suppress(ConnectionResetError):
        assert client.read().status == status
    client.close()


def slow_heads(client: RawClient) -> None:
    client.send(b"P")


def slow_bodies(client: RawClient) -> None:
    client.send(LINE + b"Content-Length: 60000000\r\n\r\n{")


def expectations(client: RawClient) -> None:
    client.send(LINE + b"Content-Length: 60000000\r\nExpect: 100-continue\r\n\r\n")


def halves(client: RawClient) -> None:
    client.send(infer(LARGE >> 4)[:-1])


def pipelines(client: RawClient) -> None:
    """Send requests until the server reads no more, because their answers are not read."""
    client.socket.settimeout(0.1)
    with contextlib.suppress(TimeoutError):
        client.send(infer(100) * 10_000)


@pytest.mark.parametrize(
    ("attack", "count"),
    [(slow_heads, 300), (slow_bodies, 300), (expectations, 50), (halves, 20), (pipelines, 5)],
)
@pytest.mark.parametrize("leave", [RawClient.close, reset])
def test_clients_that_stay_keep_nobody_waiting(
    attacked: Attacked,
    attack: Callable[[RawClient], None],
    count: int,
    leave: Callable[[RawClient], None],
) -> None:
    before = attacked.wire.figures()
    clients = [attacked.client() for _ in range(count)]
    try:
        for client in clients:
            attack(client)
        for _ in range(3):
            attacked.check_good()
            for client in clients if attack in (slow_heads, slow_bodies) else ():
                # One byte more.
                client.send(b"O")
        grown = attacked.wire.figures()["memory_kb"] - before["memory_kb"]
        assert grown < 384 << 10, f"{grown} KB more"
    finally:
        for client in clients:
            leave(client)
    until(lambda: attacked.wire.figures()["files"] <= before["files"] + 5)


def test_clients_that_leave_at_every_step_leave_nothing(attacked: Attacked) -> None:
    before = attacked.wire.figures()["files"]
    request = infer(10)
    for size in (0, 1, 100, len(request) - 1, len(request)):
        for leave in (RawClient.close, reset):
            for _ in range(40):
                client = attacked.client()
                client.send(request[:size])
                leave(client)
    client = attacked.client()
    client.send(request)
    assert client.read().status == 200
    reset(client)
    until(lambda: attacked.wire.figures()["files"] <= before + 5)


def test_thousands_of_connections(attacked: Attacked) -> None:
    before = attacked.wire.figures()["files"]
    with contextlib.ExitStack() as stack:
        for _ in range(2000):
            stack.enter_context(contextlib.closing(socket.create_connection(("127.0.0.1", attacked.port))))
        attacked.check_good()
    until(lambda: attacked.wire.figures()["files"] <= before + 5)
