"""Messages between the server and a child process, over a socket. Each is a pickled tuple after its length."""

from __future__ import annotations

import pickle
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("<Q")
# Most bytes of one read; more for a message that is known to be longer.
_READ_BYTES, _READ_MORE_BYTES = 1 << 16, 1 << 20


def packed(*message: Any) -> bytes:
    """Return the bytes of a message."""
    content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(content)) + content


class Unpacker:
    """Messages of the bytes that a socket has received. Not thread-safe."""

    def __init__(self) -> None:
        self._received = bytearray()

    def receive(self, source: socket.socket) -> bool:
        """Receive bytes; return False at the end of the stream. BlockingIOError if a non-blocking socket has none."""
        missing = self._needed() - len(self._received)
        data = source.recv(_READ_BYTES if missing <= _READ_BYTES else _READ_MORE_BYTES)
        self._received += data
        return bool(data)

    def take(self) -> tuple[Any, ...] | None:
        """Return the next message; None if it is not complete."""
        needed = self._needed()
        if len(self._received) < needed:
            return None
        message: tuple[Any, ...] = pickle.loads(memoryview(self._received)[_LENGTH.size : needed])
        del self._received[:needed]
        return message

    def _needed(self) -> int:
        """Bytes of the first message with its length, or of the length if that is not there yet."""
        if len(self._received) < _LENGTH.size:
            return _LENGTH.size
        return _LENGTH.size + int(_LENGTH.unpack_from(self._received)[0])
