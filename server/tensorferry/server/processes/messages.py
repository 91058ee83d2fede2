"""Messages between processes over a stream socket: a kind, small fields as JSON, and bytes for what is larger."""

from __future__ import annotations

import json
import socket
import struct
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

MAX_FIELDS_BYTES = 1 << 20
# Content of at most this many bytes is sent together with its fields.
_JOINED_BYTES = 64 << 10
# Most bytes of one read; more for a message that is known to be longer.
_READ_BYTES, _READ_MORE_BYTES = 64 << 10, 1 << 20
# The lengths of fields and content, which precede them.
_LENGTHS = struct.Struct("<IQ")


class MessageError(Exception):
    """A message that is malformed, or larger than the receiver takes; the text says what is wrong."""


class Message(NamedTuple):
    """A message that was received."""

    kind: str
    fields: dict[str, Any]
    content: bytes = b""


class Channel:
    """One end of a stream socket, which it owns. A send and a receive may run at the same time, each on one thread.

    If the socket does not block, `send` keeps what it does not take for `flush`, and `fill` may raise BlockingIOError.
    `max_content` is the most bytes of content that a message may have.
    """

    def __init__(self, sock: socket.socket, max_content: int = 0) -> None:
        self._socket = sock
        self.max_content = max_content
        self._received = bytearray()
        # Bytes that the first message in `_received` still needs, if its lengths are there.
        self._missing = 0
        self._unsent: deque[memoryview] = deque()

    def fileno(self) -> int:
        """Return the descriptor of the socket, for a selector."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close the socket; the other side receives the end of file. Idempotent."""
        self._unsent.clear()
        self._socket.close()

    @property
    def unsent(self) -> int:
        """The number of bytes for which `flush` must be called when the socket is writable."""
        return sum(map(len, self._unsent))

    def send(self, kind: str, fields: Mapping[str, Any], content: bytes = b"") -> None:
        """Send a message. It is lost if the other side has ended. MessageError if it is too large."""
        head = json.dumps({"kind": kind, **fields}).encode()
        self._check(len(head), len(content))
        head = _LENGTHS.pack(len(head), len(content)) + head
        parts = [head + content] if len(content) <= _JOINED_BYTES else [head, content]
        self._unsent.extend(map(memoryview, parts))
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes."""
        while self._unsent:
            try:
                sent = self._socket.send(self._unsent[0])
            except BlockingIOError:
                return
            except OSError:
                # The other side has ended. For another reason it ends now: a message that is cut would not be understood.
                self._unsent.clear()
                with suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
                return
            if sent == len(self._unsent[0]):
                self._unsent.popleft()
            else:
                self._unsent[0] = self._unsent[0][sent:]

    def receive(self) -> Message | None:
        """Wait for the next message; None at the end of file. MessageError if it is malformed."""
        while (message := self.take()) is None:
            if not self.fill():
                return None
        return message

    def fill(self) -> bool:
        """Receive bytes, of which `take` makes messages. Return False at the end of file."""
        try:
            data = self._socket.recv(_READ_BYTES if self._missing <= _READ_BYTES else _READ_MORE_BYTES)
        except ConnectionResetError:
            # The other side has ended before it had read everything.
            return False
        self._received += data
        return bool(data)

    def take(self) -> Message | None:
        """Return the next message that was received; None if none is complete. MessageError if it is malformed."""
        if len(self._received) < _LENGTHS.size:
            return None
        fields_bytes, content_bytes = _LENGTHS.unpack_from(self._received)
        self._check(fields_bytes, content_bytes)
        begin, end = _LENGTHS.size + fields_bytes, _LENGTHS.size + fields_bytes + content_bytes
        self._missing = max(0, end - len(self._received))
        if self._missing:
            return None
        with memoryview(self._received) as received:
            head, content = bytes(received[_LENGTHS.size : begin]), bytes(received[begin:end])
        del self._received[:end]
        try:
            fields = json.loads(head.decode())
        except (ValueError, RecursionError) as error:
            raise MessageError(f"the fields of a message, {len(head)} bytes, are no JSON: {error}") from None
        kind = fields.pop("kind", None) if isinstance(fields, dict) else None
        if not isinstance(kind, str):
            raise MessageError(f"the fields of a message, {len(head)} bytes, are no JSON object with a kind")
        return Message(kind, fields, content)

    def _check(self, fields: int, content: int) -> None:
        if fields > MAX_FIELDS_BYTES or content > self.max_content:
            raise MessageError(
                f"a message has {fields} bytes of fields and {content} of content; at most {MAX_FIELDS_BYTES} and "
                f"{self.max_content} are possible"
            )
