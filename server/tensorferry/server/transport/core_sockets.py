"""Closes the port to newcomers while the calls of those who are connected go on.

grpc's core closes its port and its calls' listener in one step, and what arrives between that and the moment at which
a balancer has heard of it is lost. A balancer that is refused a connection takes another server, whatever it is;
so the port is closed first. The listening sockets are core's, and grpcio does not show them: they are found among
the process's files, by their port, as in corks.py. Core takes it for a socket that broke, and says so in one
line on stderr.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

_FILES = "/proc/self/fd"


def close_port(port: int) -> int:
    """No connection to this port is taken any more; those that there are stay. How many sockets listened on it.

    0 where the system does not show a process its files: then newcomers are taken as before.
    """
    return _shut(lambda borrowed: _listens(borrowed, port))


def close_connections(port: int) -> int:
    """Close the connections to this port, after what was written to them; how many there were.

    Their clients get UNAVAILABLE for calls in progress, and try calls that the server has not seen elsewhere.
    """
    return _shut(lambda borrowed: _is_of(borrowed, port) and not _listens(borrowed, port))


def _shut(chosen: Callable[[socket.socket], bool]) -> int:
    try:
        names = os.listdir(_FILES)
    except OSError:
        return 0
    closed = 0
    for name in names:
        try:
            with _Borrowed(fileno=int(name)) as borrowed:
                if chosen(borrowed):
                    borrowed.shutdown(socket.SHUT_RDWR)
                    closed += 1
        except OSError:
            # No socket, or it is closed by now.
            continue
    return closed


class _Borrowed(socket.socket):
    """A socket that somebody else has, and closes."""

    def __exit__(self, *error: object) -> None:
        self.detach()

    def __del__(self) -> None:
        self.detach()


def _listens(borrowed: socket.socket, port: int) -> bool:
    return _is_of(borrowed, port) and bool(borrowed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _is_of(borrowed: socket.socket, port: int) -> bool:
    return borrowed.family in (socket.AF_INET, socket.AF_INET6) and borrowed.getsockname()[1] == port
