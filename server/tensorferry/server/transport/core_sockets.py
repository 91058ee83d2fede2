"""The sockets of grpc's core, found among the process's open files by their local port.

grpcio does not expose them. Each is borrowed: core still owns it and closes it.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Sequence


class BorrowedSocket(socket.socket):
    """A socket object for a file descriptor that another owner closes."""

    def __del__(self) -> None:
        self.detach()


def close_port(port: int) -> int:
    """Close the listening sockets of this port and return their number. Open connections stay.

    Core itself closes its port and refuses new calls in one step. A balancer that still sends calls at that moment
    loses them, while a refused connection makes it choose another server. Core reports the closed listener as an
    error on stderr. Returns 0, and closes nothing, where the system does not show a process its open files.
    """
    return _shut_down([sock for sock in _sockets_of(port) if _listens(sock)])


def close_connections(port: int) -> int:
    """Close the connections to this port after what was written to them; return their number.

    Clients get UNAVAILABLE for calls in progress, and retry elsewhere calls that the server has not seen.
    """
    return _shut_down(connections(port))


def connections(port: int, max_files: float = math.inf) -> Sequence[BorrowedSocket]:
    """Return the connections to this port; none if the process has more than `max_files` open files."""
    return [sock for sock in _sockets_of(port, max_files) if not _listens(sock)]


def _sockets_of(port: int, max_files: float = math.inf) -> list[BorrowedSocket]:
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:
        # The process may have no file descriptor left, which listing needs; or it may not see its open files.
        return []
    if len(names) > max_files:
        return []
    found = []
    for name in names:
        try:
            borrowed = BorrowedSocket(fileno=int(name))
            if borrowed.family in (socket.AF_INET, socket.AF_INET6) and borrowed.getsockname()[1] == port:
                found.append(borrowed)
        except OSError:
            # It is no socket, or it was closed meanwhile.
            continue
    return found


def _listens(sock: BorrowedSocket) -> bool:
    try:
        return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError:
        return False


def _shut_down(sockets: Sequence[BorrowedSocket]) -> int:
    closed = 0
    for sock in sockets:
        try:
            sock.shutdown(socket.SHUT_RDWR)
            closed += 1
        except OSError:
            # Core has closed it meanwhile.
            continue
    return closed
