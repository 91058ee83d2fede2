"""Limits for HTTP connections: their number, per address, and the time for a request to arrive."""

from __future__ import annotations

import io
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


class HttpConnections:
    """Open connections: at most `max_connections`, and at most `max_per_address` from one address. Thread-safe.

    A connection beyond a limit is admitted, and the oldest of the same address, or else of the address with most
    connections, is closed. So clients that keep connections open cannot block a health probe.
    """

    def __init__(self, max_connections: int, max_per_address: int) -> None:
        self._max_connections = max_connections
        self._max_per_address = max_per_address
        # Guards _addresses (oldest first) and _per_address. No connection is closed while it is held.
        self._lock = threading.Lock()
        # Notified when no connection is open.
        self._none_open = threading.Condition(self._lock)
        self._addresses: dict[socket.socket, str] = {}
        self._per_address: Counter[str] = Counter()

    def admit(self, connection: socket.socket, address: str) -> None:
        """Add a connection, and shut down an old one if there are too many."""
        with self._lock:
            crowded: str | None = None
            if self._per_address[address] >= self._max_per_address:
                crowded = address
            elif len(self._addresses) >= self._max_connections:
                crowded = self._per_address.most_common(1)[0][0]
            evicted = None
            if crowded is not None:
                evicted = next(old for old, origin in self._addresses.items() if origin == crowded)
                self._forget_locked(evicted)
            self._addresses[connection] = address
            self._per_address[address] += 1
        if evicted is not None:
            # Its thread then reads the end of the stream and closes the socket.
            with suppress(OSError):
                evicted.shutdown(socket.SHUT_RDWR)

    def ended(self, connection: socket.socket) -> None:
        """Remove a closed connection. Idempotent."""
        with self._lock:
            self._forget_locked(connection)

    def await_none(self, seconds: float) -> None:
        """Wait until no connection is open, at most this long."""
        with self._none_open:
            self._none_open.wait_for(lambda: not self._addresses, seconds)

    def __len__(self) -> int:
        with self._lock:
            return len(self._addresses)

    def _forget_locked(self, connection: socket.socket) -> None:
        address = self._addresses.pop(connection, None)
        if address is not None:
            self._per_address[address] -= 1
            if not self._per_address[address]:
                del self._per_address[address]
            if not self._addresses:
                self._none_open.notify_all()


class TimedReader(io.RawIOBase):
    """Reader of a connection with a limit of `seconds` in total. TimeoutError after that.

    A socket's own timeout restarts with every byte.
    """

    def __init__(
        self, connection: socket.socket, seconds: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._connection = connection
        self._now = now
        self._until = now() + seconds

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Read into a buffer, within the remaining time."""
        remaining = self._until - self._now()
        if remaining <= 0:
            raise TimeoutError("the request took too long to arrive")
        self._connection.settimeout(remaining)
        return self._connection.recv_into(buffer)
