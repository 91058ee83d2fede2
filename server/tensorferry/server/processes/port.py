"""Port that all server processes share, reserved by the supervisor."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from typing import Any

from tensorferry.server.system.addresses import address_of, cannot_listen

# Attempts to find a port that is free on each address of a host name.
_ATTEMPTS = 10

_Address = tuple[socket.AddressFamily, tuple[Any, ...]]


class PortReservation:
    """Sockets that are bound to the address, but do not listen. The processes join them by SO_REUSEPORT.

    The port's number stays reserved while processes are replaced. The kernel lets only processes with the same effective
    user join. StartError if another program uses the port. Port 0 reserves a free one.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        attempts = _ATTEMPTS if port == 0 else 1
        while True:
            attempts -= 1
            try:
                self.port, self._sockets = _bind_all(host, port)
                return
            except OSError as error:
                if error.errno != errno.EADDRINUSE or not attempts:
                    raise cannot_listen(address_of(host, port), error) from None

    @property
    def address(self) -> str:
        """The address as host:port."""
        return address_of(self._host, self.port)

    def close(self) -> None:
        """Release the port. Idempotent."""
        for sock in self._sockets:
            sock.close()


def _bind_all(host: str, port: int) -> tuple[int, Sequence[socket.socket]]:
    """Bind a socket to each address of the host that this machine has, and return their port."""
    bound: list[socket.socket] = []
    missing: OSError | None = None
    try:
        for family, address in _addresses(host):
            try:
                sock = _bind(family, (address[0], port, *address[2:]))
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                missing = error
                continue
            bound.append(sock)
            port = sock.getsockname()[1]
        if not bound:
            raise missing or OSError(errno.EADDRNOTAVAIL, "the host has no address")
    except BaseException:
        for sock in bound:
            sock.close()
        raise
    return port, bound


def _addresses(host: str) -> Sequence[_Address]:
    host = host.removeprefix("[").removesuffix("]")
    if host in ("0.0.0.0", "::"):
        # grpc listens on all addresses of both families for either of them.
        if socket.has_dualstack_ipv6():
            return [(socket.AF_INET6, ("::", 0, 0, 0))]
        return [(socket.AF_INET, ("0.0.0.0", 0))]
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def _bind(family: socket.AddressFamily, address: tuple[Any, ...]) -> socket.socket:
    """Return a socket that no other program can have bound, and that server processes can join."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        # Connections of an earlier server that are in TIME_WAIT do not matter.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        # Only now, because bind would otherwise join another server's port.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # Another program could otherwise bind the port while no process listens.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except BaseException:
        sock.close()
        raise
    return sock
