"""Responses of one batch to one client leave in one TCP segment.

Core writes each response with a system call of its own, which takes a sixth of a small call's time and wakes the
client for each response. TCP_CORK (Linux only) holds small writes back: between `begin` and `end` the kernel collects
them. Core may close a socket and reuse its number while its option is set. That does no harm, because the option is
reset at once and the kernel holds nothing back for more than 0.2 s.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Sequence

from tensorferry.server.transport import core_sockets
from tensorferry.server.transport.core_sockets import BorrowedSocket

# With more open files the search takes too long on the polling thread. It would also gain little, because each
# connection then gets few responses of a batch.
_MAX_FILES = 256
_RESCAN_SECONDS = 1.0


class TcpCork:
    """TCP_CORK on a port's connections while the responses of a batch are written. For one thread.

    Does nothing before `serve`, and for fewer than two responses per connection.
    """

    def __init__(self) -> None:
        self._port = 0
        self._rescan_at = math.inf
        # The known connections, and those that are corked now.
        self._sockets: Sequence[BorrowedSocket] = ()
        self.corked: Sequence[BorrowedSocket] = ()

    def serve(self, port: int) -> None:
        """Apply to the connections of this port from now on."""
        self._port = port
        self._rescan_at = -math.inf

    def begin(self, count: int) -> None:
        """Cork the connections, because about `count` responses follow."""
        now = time.monotonic()
        if now >= self._rescan_at:
            self._rescan_at = now + _RESCAN_SECONDS
            self._sockets = core_sockets.connections(self._port, _MAX_FILES)
        if self._sockets and count >= 2 * len(self._sockets):
            self.corked = self._sockets
            _set(self.corked, 1)

    def flush(self) -> None:
        """Send what was collected, and collect on."""
        _set(self.corked, 0)
        _set(self.corked, 1)

    def end(self) -> None:
        """Uncork the connections, which sends what was collected."""
        corked, self.corked = self.corked, ()
        _set(corked, 0)


def _set(sockets: Sequence[BorrowedSocket], value: int) -> None:
    for sock in sockets:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, value)
        except OSError:
            # It was closed meanwhile; the next scan drops it.
            continue
