"""Limits of connections to the metrics port: in total, per address, and for the time of a request."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from urllib.parse import urlsplit

import pytest
from support.server.rig import PATIENCE

from tensorferry.batcher.testing import VirtualClock
from tensorferry.server.observability.monitoring import http_server
from tensorferry.server.observability.monitoring.http_connections import HttpConnections, TimedReader
from tensorferry.server.observability.monitoring.http_server import MetricsServer
from tensorferry.server.system.addresses import listen_for_metrics


@pytest.fixture
def pairs() -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    with ExitStack() as stack:
        made = [socket.socketpair() for _ in range(6)]
        for pair in made:
            for end in pair:
                stack.enter_context(end)
        yield made


def is_open(end: socket.socket) -> bool:
    end.setblocking(False)
    try:
        return end.recv(1) != b""
    except BlockingIOError:
        return True


def test_the_oldest_connection_of_the_same_address_is_closed(
    pairs: list[tuple[socket.socket, socket.socket]],
) -> None:
    connections = HttpConnections(max_connections=6, max_per_address=2)
    for ours, _ in pairs[:3]:
        connections.admit(ours, "10.0.0.1")
    connections.admit(pairs[3][0], "10.0.0.2")
    assert [is_open(theirs) for _, theirs in pairs[:4]] == [False, True, True, True]
    assert len(connections) == 3


def test_at_the_total_limit_a_connection_of_the_busiest_address_is_closed(
    pairs: list[tuple[socket.socket, socket.socket]],
) -> None:
    connections = HttpConnections(max_connections=4, max_per_address=3)
    for (ours, _), address in zip(pairs, ["a", "b", "b", "b", "c"], strict=False):
        connections.admit(ours, address)
    assert [is_open(theirs) for _, theirs in pairs[:5]] == [True, False, True, True, True]


def test_a_closed_connection_is_not_counted(pairs: list[tuple[socket.socket, socket.socket]]) -> None:
    connections = HttpConnections(max_connections=2, max_per_address=2)
    for ours, _ in pairs:
        connections.admit(ours, "a")
        connections.ended(ours)
        connections.ended(ours)
    assert len(connections) == 0
    assert all(is_open(theirs) for _, theirs in pairs)


def test_a_slow_request_has_a_total_limit(pairs: list[tuple[socket.socket, socket.socket]]) -> None:
    clock = VirtualClock()
    ours, theirs = pairs[0]
    reader = TimedReader(ours, 10.0, clock.now)
    read = []
    for _ in range(3):
        theirs.send(b"x")
        read.append(reader.read(1))
        clock.advance(4.0)
    theirs.send(b"x")
    with pytest.raises(TimeoutError):
        reader.read(1)
    assert read == [b"x"] * 3


def test_slow_clients_do_not_block_a_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_MAX_CONNECTIONS", 8)
    monkeypatch.setattr(http_server, "_MAX_PER_ADDRESS", 4)
    server = MetricsServer(listen_for_metrics("127.0.0.1", 0), lambda accept: (b"page\n", "text/plain"))
    parts = urlsplit(server.url)
    address = (parts.hostname, parts.port)
    with ExitStack() as slow:
        for _ in range(12):
            connection = slow.enter_context(socket.create_connection(address, timeout=PATIENCE))
            connection.sendall(b"GET /metr")
        with socket.create_connection(address, timeout=PATIENCE) as probe:
            probe.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            assert probe.makefile("rb").read().endswith(b"page\n")
    server.close()
