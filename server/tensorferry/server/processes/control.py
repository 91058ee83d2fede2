"""Control channel between the supervisor and a server process: small JSON packets on a Unix socket pair."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from typing import Any, NamedTuple

MAX_PACKET_BYTES = 64 << 10


class ControlError(Exception):
    """The other side has sent what is not a message; the text says what is wrong."""


class Message(NamedTuple):
    """A message that was received."""

    kind: str
    fields: dict[str, Any]


class ControlChannel:
    """One end of the socket pair. A send and a receive may run at the same time, each on one thread.

    Use `set_blocking(False)` for BlockingIOError instead of waiting.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    @classmethod
    def pair(cls) -> tuple[ControlChannel, socket.socket]:
        """Return the channel of this process, and the end for the other one."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for sock in (ours, theirs):
            # Room for the largest packet, whatever the system's default is.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MAX_PACKET_BYTES)
        return cls(ours), theirs

    def set_blocking(self, blocking: bool) -> None:
        """Choose whether `send` and `receive` wait."""
        self._socket.setblocking(blocking)

    def fileno(self) -> int:
        """Return the descriptor of the socket, for a selector."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close the channel; the other side receives the end of file. Idempotent."""
        self._socket.close()

    def send(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Send a message. ControlError if it is larger than a packet may be.

        OSError if the other side is closed; BlockingIOError if its buffer is full and the channel does not block.
        """
        data = json.dumps({"kind": kind, **fields}, separators=(",", ":")).encode()
        if len(data) > MAX_PACKET_BYTES:
            raise ControlError(f"{kind} has {len(data)} bytes; at most {MAX_PACKET_BYTES} are possible")
        self._socket.send(data, socket.MSG_NOSIGNAL)

    def receive(self) -> Message | None:
        """Return the next message; None at the end of file. ControlError if it is malformed."""
        try:
            data = self._socket.recv(MAX_PACKET_BYTES + 1)
        except ConnectionResetError:
            # The other side has closed the channel before it had read everything. The kernel reports this first, and once;
            # what the other side had sent before comes next.
            data = self._socket.recv(MAX_PACKET_BYTES + 1)
        return _parse(data) if data else None


def _parse(data: bytes) -> Message:
    if len(data) > MAX_PACKET_BYTES:
        raise ControlError(f"a packet has more than {MAX_PACKET_BYTES} bytes")
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ControlError(f"a packet of {len(data)} bytes is no JSON: {error}") from None
    kind = fields.pop("kind", None) if isinstance(fields, dict) else None
    if not isinstance(kind, str):
        raise ControlError(f"a packet of {len(data)} bytes is no JSON object with a kind")
    return Message(kind, fields)
