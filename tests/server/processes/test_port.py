"""The port that server processes share: reserved, joined by them, and refused to others."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import grpc
import pytest
from support.open_files import open_files

from tensorferry.server.errors import StartError
from tensorferry.server.processes.port import PortReservation

_HAS_IPV6 = socket.has_dualstack_ipv6()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def reserve(stack: ExitStack, host: str = "127.0.0.1", number: int = 0) -> PortReservation:
    reservation = PortReservation(host, number)
    stack.callback(reservation.close)
    return reservation


def listener(stack: ExitStack, host: str, number: int, *, shares: bool, reuses: bool = True) -> socket.socket:
    """A listening socket like those of grpc."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuses)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shares)
    sock.bind((host, number))
    sock.listen()
    return sock


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "0.0.0.0", *(["::", "::1", "[::1]"] if _HAS_IPV6 else [])]
)
def test_grpc_joins(stack: ExitStack, host: str) -> None:
    reservation = reserve(stack, host)
    with ThreadPoolExecutor(1) as threads:
        servers = [grpc.server(threads, options=[("grpc.so_reuseport", 1)]) for _ in range(2)]
        for server in servers:
            assert server.add_insecure_port(reservation.address) == reservation.port
            server.start()
        for server in servers:
            server.stop(None).wait()


def test_a_machine_without_ipv6(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    taken = reserve(stack, "0.0.0.0").port
    with pytest.raises(StartError, match=str(taken)):
        reserve(stack, "127.0.0.1", taken)


def test_the_number_is_reserved_while_nothing_listens(stack: ExitStack) -> None:
    reservation = reserve(stack)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", reservation.port))
    with ExitStack() as process:
        listener(process, "127.0.0.1", reservation.port, shares=True)
    for reuse in (False, True):
        with pytest.raises(OSError, match="in use"):
            listener(stack, "127.0.0.1", reservation.port, shares=False, reuses=reuse)
    listener(stack, "127.0.0.1", reservation.port, shares=True)


@pytest.mark.parametrize("shares", [False, True])
def test_a_port_of_another_program_is_refused(stack: ExitStack, shares: bool) -> None:
    number = listener(stack, "127.0.0.1", 0, shares=shares).getsockname()[1]
    text = f"cannot listen on 127.0.0.1:{number}: the address is in use, or is not an address of this machine"
    with pytest.raises(StartError, match=text):
        reserve(stack, "127.0.0.1", number)
    for host in ("0.0.0.0", *(["::"] if _HAS_IPV6 else [])):
        with pytest.raises(StartError, match="in use"):
            reserve(stack, host, number)


def test_a_port_with_connections_of_an_earlier_server_is_free(stack: ExitStack) -> None:
    with ExitStack() as earlier:
        sock = listener(earlier, "127.0.0.1", 0, shares=False)
        number = sock.getsockname()[1]
        with socket.create_connection(("127.0.0.1", number)) as client:
            # The side that closes first keeps the port in TIME_WAIT.
            sock.accept()[0].close()
            assert client.recv(1) == b""
    reserve(stack, "127.0.0.1", number)
    listener(stack, "127.0.0.1", number, shares=True)


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_of_another_machine_is_refused(stack: ExitStack, host: str) -> None:
    with pytest.raises(StartError, match=f"cannot listen on {host}:8001: "):
        reserve(stack, host, 8001)


@pytest.mark.skipif(not _HAS_IPV6, reason="the machine has no IPv6")
def test_a_name_reserves_each_of_its_addresses(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = [
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **options: addresses)
    before = open_files()
    reservation = reserve(stack, "name")
    assert len(open_files() - before) == 2
    for host in ("::1", "127.0.0.1"):
        with ExitStack() as other, pytest.raises(OSError, match="in use"):
            listener(other, host, reservation.port, shares=False)
    reservation.close()
    assert not open_files() - before
