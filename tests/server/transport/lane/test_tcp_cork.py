"""Small writes on a port's connections are held back between `begin` and `end`, and at no other time."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from tensorferry.server.transport.lane import tcp_cork
from tensorferry.server.transport.lane.tcp_cork import TcpCork

# One more and a write might fill a packet of its own.
SMALL = b"answer"
ENDLESS = 1 << 30


class Served:
    """A listening socket with connections, without Nagle's algorithm as in core."""

    def __init__(self, connections: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.clients = [socket.create_connection(("127.0.0.1", self.port)) for _ in range(connections)]
        self.servers = [self.accept() for _ in range(connections)]
        for each in self.clients:
            each.setblocking(False)

    def accept(self) -> socket.socket:
        accepted, _ = self._listener.accept()
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return accepted

    def close(self) -> None:
        for each in (*self.clients, *self.servers, self._listener):
            each.close()


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served(2)
    yield served
    served.close()


@pytest.fixture
def held(served: Served) -> TcpCork:
    """The cork of the connections."""
    made = TcpCork()
    made.serve(served.port)
    return made


def received(client: socket.socket) -> bytes:
    try:
        return client.recv(1 << 20)
    except BlockingIOError:
        return b""


def holds(server: socket.socket) -> bool:
    return server.getsockopt(socket.IPPROTO_TCP, socket.TCP_CORK) == 1


def test_writes_in_between_are_sent_together_at_the_end(served: Served, held: TcpCork) -> None:
    held.begin(8)
    for server in served.servers:
        for _ in range(4):
            server.send(SMALL)
    assert [received(client) for client in served.clients] == [b"", b""]
    held.end()
    assert [received(client) for client in served.clients] == [4 * SMALL, 4 * SMALL]
    assert not any(map(holds, served.servers))


def test_fewer_than_two_responses_per_connection_are_sent_at_once(served: Served, held: TcpCork) -> None:
    held.begin(3)
    served.servers[0].send(SMALL)
    assert received(served.clients[0]) == SMALL
    held.end()


def test_a_flush_sends_what_was_collected_and_collects_on(served: Served, held: TcpCork) -> None:
    held.begin(4)
    for _ in range(2):
        served.servers[0].send(SMALL)
        assert received(served.clients[0]) == b""
        held.flush()
        assert received(served.clients[0]) == SMALL
    assert all(map(holds, served.servers))
    held.end()
    held.flush()
    assert not any(map(holds, served.servers))


def test_new_and_closed_connections_are_found(
    served: Served, held: TcpCork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_cork, "_RESCAN_SECONDS", 0.0)
    held.begin(4)
    assert all(map(holds, served.servers))
    gone = served.servers.pop()
    gone.close()
    # Closed while it holds back: nothing to take back, and no harm done.
    held.end()
    late = socket.create_connection(("127.0.0.1", served.port))
    served.clients.append(late)
    served.servers.append(served.accept())
    held.begin(4)
    assert all(map(holds, served.servers))
    held.end()


def test_a_scan_closes_no_socket(served: Served) -> None:
    sockets = [*served.clients, *served.servers]
    before = [os.fstat(one.fileno()).st_ino for one in sockets]
    for _ in range(3):
        held = TcpCork()
        held.serve(served.port)
        held.begin(4)
        held.end()
    del held
    assert [os.fstat(one.fileno()).st_ino for one in sockets] == before
    served.servers[0].send(SMALL)
    assert received(served.clients[0]) == SMALL


def test_other_ports_are_left_alone(served: Served) -> None:
    other = Served(1)
    try:
        held = TcpCork()
        held.serve(other.port)
        held.begin(ENDLESS)
        assert holds(other.servers[0])
        assert not any(map(holds, (*served.servers, *other.clients)))
        held.end()
    finally:
        other.close()


def test_nothing_is_corked_with_too_many_open_files(
    served: Served, held: TcpCork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_cork, "_MAX_FILES", 3)
    held.begin(ENDLESS)
    assert not any(map(holds, served.servers))
