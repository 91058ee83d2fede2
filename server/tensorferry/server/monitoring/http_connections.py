"""Bounds for HTTP connections: how many are open, from where, and how long a request may take to arrive."""

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
    """Open connections, oldest first; at most `most` in all, and `most_per_address` from one address.

    A connection beyond a bound is admitted, and the oldest one is closed for it: the oldest of the same address, or
    else of the address that has most. So clients that keep connections open cannot shut out a probe.
    Thread-safe.
    """

    def __init__(self, most: int, most_per_address: int) -> None:
        self._most = most
        self._most_per_address = most_per_address
        # Guards both. No connection is closed while it is held.
        self._lock = threading.Lock()
        self._addresses: dict[socket.socket, str] = {}
        self._per_address: Counter[str] = Counter()

    def admit(self, connection: socket.socket, address: str) -> None:
        """Count a new connection, and shut down the oldest where that is one too many."""
        with self._lock:
            crowded: str | None = None
            if self._per_address[address] >= self._most_per_address:
                crowded = address
            elif len(self._addresses) >= self._most:
                crowded = self._per_address.most_common(1)[0][0]
            evicted = None
            if crowded is not None:
                evicted = next(one for one, its in self._addresses.items() if its == crowded)
                self._forget_locked(evicted)
            self._addresses[connection] = address
            self._per_address[address] += 1
        if evicted is not None:
            # Its thread then reads the end of the connection, and closes it.
            with suppress(OSError):
                evicted.shutdown(socket.SHUT_RDWR)

    def ended(self, connection: socket.socket) -> None:
        """A connection is closed. Idempotent."""
        with self._lock:
            self._forget_locked(connection)

    def __len__(self) -> int:
        with self._lock:
            return len(self._addresses)

    def _forget_locked(self, connection: socket.socket) -> None:
        address = self._addresses.pop(connection, None)
        if address is not None:
            self._per_address[address] -= 1
            if not self._per_address[address]:
                del self._per_address[address]


class TimedReader(io.RawIOBase):
    """What a connection sends within `seconds`, however slowly it comes; TimeoutError after that.

    A socket's own timeout begins again with every byte.
    """

    def __init__(
        self, connection: socket.socket, seconds: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._connection = connection
        self._now = now
        self._until = now() + seconds

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Wait for bytes until the time is over."""
        left = self._until - self._now()
        if left <= 0:
            raise TimeoutError("the request took too long to arrive")
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)
