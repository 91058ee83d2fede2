"""A client of HTTP/2 that does what no library lets one do: leave in the middle of a message, never read."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from types import TracebackType

from support.server.rig import PATIENCE

UNARY = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"

_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 8
_FRAME_BYTES = 16384
_END_STREAM, _ACK, _END_HEADERS = 1, 1, 4
_CANCEL = 8
_INITIAL_WINDOW_SIZE = 4


Wrap = Callable[[socket.socket], socket.socket]


def message(data: bytes) -> bytes:
    """A gRPC message with its prefix."""
    return struct.pack(">BI", 0, len(data)) + data


class RawClient:
    """One connection. Calls are numbered 1, 3, 5, ... in the order in which they are begun.

    `window` is the flow-control window of each call in bytes. `wrap` makes the connection one of TLS. EOFError if the
    server closes the connection while it is read.
    """

    def __init__(self, address: str, *, window: int = 65535, wrap: Wrap = lambda bare: bare) -> None:
        host, _, port = address.rpartition(":")
        settings = struct.pack(">HI", _INITIAL_WINDOW_SIZE, window)
        self._socket = socket.create_connection((host, int(port)), PATIENCE)
        try:
            self._socket = wrap(self._socket)
            self._socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(_SETTINGS, 0, 0, settings))
        except OSError:
            self._socket.close()
            raise

    def __enter__(self) -> RawClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def begin(self, call: int, path: str, *more: tuple[str, str]) -> None:
        """A call's metadata: what each call has, and more."""
        fields = [
            (":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "localhost"),
            ("content-type", "application/grpc"), ("te", "trailers"), *more,
        ]  # fmt: skip
        # HPACK: each a literal that is not indexed, without Huffman's code.
        block = b"".join(
            b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
            for name, value in fields
        )
        self._socket.sendall(_frame(_HEADERS, _END_HEADERS, call, block))

    def send(self, call: int, data: bytes, *, last: bool = False) -> None:
        """Bytes of a call's messages."""
        for at in range(0, len(data) or 1, _FRAME_BYTES):
            ends = last and at + _FRAME_BYTES >= len(data)
            part = data[at : at + _FRAME_BYTES]
            self._socket.sendall(_frame(_DATA, _END_STREAM if ends else 0, call, part))

    def cancel(self, call: int) -> None:
        """The call is over, the connection is not."""
        self._socket.sendall(_frame(_RST_STREAM, 0, call, struct.pack(">I", _CANCEL)))

    def leave(self) -> None:
        """Nothing more is sent or read."""
        self._socket.close()

    def reset(self) -> None:
        """Close the connection by RST."""
        reset(self._socket)

    def acknowledge(self) -> None:
        """Acknowledge the server's SETTINGS, once they have come."""
        while self._next_frame()[0] != _SETTINGS:
            pass
        self._socket.sendall(_frame(_SETTINGS, _ACK, 0, b""))

    def ping(self, content: bytes) -> None:
        """Send a PING of eight bytes and read until it is acknowledged."""
        self._socket.sendall(_frame(_PING, 0, 0, content))
        while self._next_frame() != (_PING, _ACK, 0, content):
            pass

    def await_data(self, call: int) -> None:
        """Read until a part of a response has come, or the call has ended. No room is made for more than 64 KiB."""
        while True:
            kind, flags, of_call, _ = self._next_frame()
            if of_call == call and (kind == _DATA or (kind == _HEADERS and flags & _END_STREAM)):
                return

    def await_end(self, call: int) -> None:
        """Read until a call has ended, with room for all of its responses."""
        self._socket.sendall(_frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", 1 << 30)))
        while (frame := self._next_frame())[::2] != (_HEADERS, call) or not frame[1] & _END_STREAM:
            pass

    def _next_frame(self) -> tuple[int, int, int, bytes]:
        head = self._read(9)
        size = int.from_bytes(head[:3], "big")
        kind, flags, call = struct.unpack(">BBI", head[3:])
        return kind, flags, call, self._read(size)

    def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = self._socket.recv(count - len(data))
            if not part:
                raise EOFError("the server has closed the connection")
            data += part
        return data


def reset(connection: socket.socket) -> None:
    """Close a connection by RST: SO_LINGER with time 0 discards unsent and unread bytes."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def _frame(kind: int, flags: int, call: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, call) + payload
