"""Answers of one batch that go to one client travel together.

grpc's core writes each answer to its connection by itself: a system call that takes the packet through
the kernel to the other side, and wakes whoever waits there. That is a sixth of what a small call costs,
and the client is woken for each of its answers. TCP can hold small writes back (TCP_CORK, Linux only):
between `begin` and `end` the kernel gathers them, and what was gathered leaves as one.

The sockets are core's, and grpcio does not show them: they are found among the process's files, by
their local port. They are only borrowed. An option that is set on a number which core has given to another
socket meanwhile does no harm: it is taken back at once, and the kernel itself holds nothing for more than 0.2 s.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Sequence

_CORK: int | None = getattr(socket, "TCP_CORK", None)
_FILES = "/proc/self/fd"

# With more files it would take too long to look through them, on a thread that serves everybody; and of
# so many connections each would have few of a batch's answers.
_MAX_FILES = 256
_RESCAN_SECONDS = 1.0
# What is larger fills packets of its own.
_LARGE_BYTES = 16 << 10
# As many small answers are written within about a millisecond: no longer does the first wait.
_MAX_CORKED_RESPONSES = 32


class TcpCork:
    """Holds back what is sent on a port's connections while the answers of a batch are written.

    It does nothing until `serve` was called, where TCP has no such option, and for batches of fewer than
    two requests for each connection. For one thread.
    """

    def __init__(self) -> None:
        self._port: int | None = None
        self._rescan_at = math.inf
        # All that are known, and those that hold back now.
        self._sockets: Sequence[BorrowedSocket] = ()
        self.corked: Sequence[BorrowedSocket] = ()
        self._written = 0
        # Of the answers that were announced, those to come; fewer than none where nobody knew how many.
        self._pending = 0

    def serve(self, port: int) -> None:
        """From now on for the connections to this port."""
        if _CORK is not None and os.path.isdir(_FILES):
            self._port = port
            self._rescan_at = -math.inf

    def begin(self, count: int) -> None:
        """So many answers are about to be written."""
        now = time.monotonic()
        if now >= self._rescan_at:
            self._rescan_at = now + _RESCAN_SECONDS
            self._sockets = _connections(self._port)
        if self._sockets and count >= 2 * len(self._sockets):
            self._written, self._pending, self.corked = 0, count, self._sockets
            _set(self.corked, 1)

    def written(self, nbytes: int) -> None:
        """An answer of this size was written: what has been gathered may have to leave."""
        if not self.corked:
            return
        self._written += 1
        self._pending -= 1
        if nbytes > _LARGE_BYTES:
            self.end()
        # After the last of them all leaves anyway.
        elif self._written >= _MAX_CORKED_RESPONSES and self._pending:
            self._written = 0
            _set(self.corked, 0)
            _set(self.corked, 1)

    def end(self) -> None:
        """The answers are written; what was gathered leaves."""
        corked, self.corked = self.corked, ()
        _set(corked, 0)


class BorrowedSocket(socket.socket):
    """A socket that somebody else has, and closes."""

    def __del__(self) -> None:
        self.detach()


def _connections(port: int | None) -> Sequence[BorrowedSocket]:
    """The process's TCP connections with this local port; none where there are too many files to look."""
    try:
        names = os.listdir(_FILES)
    except OSError:
        # To look needs a file itself, and the process may have no more: answers leave one by one.
        return ()
    if len(names) > _MAX_FILES:
        return ()
    found = []
    for name in names:
        try:
            borrowed = BorrowedSocket(fileno=int(name))
            if borrowed.family in (socket.AF_INET, socket.AF_INET6) and borrowed.getsockname()[1] == port:
                borrowed.getpeername()
                found.append(borrowed)
        except OSError:
            # No socket, or one that listens, or it is closed by now.
            continue
    return found


def _set(sockets: Sequence[BorrowedSocket], value: int) -> None:
    for each in sockets:
        try:
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, value)
        except OSError:
            # It is closed by now; the next look finds out.
            continue
