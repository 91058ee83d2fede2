"""Clients that keep connections to the metrics port open do not block others."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from urllib.parse import urlsplit

import pytest
from support.server.rig import PATIENCE

from tensorferry.server.observability.monitoring import http_server
from tensorferry.server.observability.monitoring.http_server import MetricsServer
from tensorferry.server.system.addresses import listen_for_metrics
from tensorferry.server.transport.http.server import ConnectionLimits


@pytest.mark.parametrize(("limits", "open_ones"), [((8, 4), 4), ((8, 64), 8)])
def test_slow_clients_do_not_block_a_probe(
    limits: tuple[int, int], open_ones: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest connections are closed, of the address that has too many, or the most."""
    monkeypatch.setattr(http_server, "_LIMITS", ConnectionLimits(*limits, unfinished=True))
    server = MetricsServer(listen_for_metrics("127.0.0.1", 0), lambda accept: (b"page\n", "text/plain"))
    parts = urlsplit(server.url)
    address = (parts.hostname, parts.port)
    with ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection(address, timeout=PATIENCE)) for _ in range(12)]
        for connection in slow:
            connection.sendall(b"GET /metr")
        with socket.create_connection(address, timeout=PATIENCE) as probe:
            probe.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            assert probe.makefile("rb").read().endswith(b"page\n")
            # With the probe.
            for connection in slow[: len(slow) - open_ones + 1]:
                assert is_closed(connection)
        for connection in slow[len(slow) - open_ones + 1 :]:
            connection.sendall(b"ics HTTP/1.0\r\n\r\n")
            assert connection.makefile("rb").read().endswith(b"page\n")
    server.close()


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True
