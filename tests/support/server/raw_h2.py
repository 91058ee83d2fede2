"""A client of HTTP/2 that does what no library lets one do: leave in the middle of a message, never read."""

from __future__ import annotations

import socket
import struct
from types import TracebackType

from support.server.rig import PATIENCE

UNARY = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"

_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING = 0, 1, 3, 4, 6
_END_STREAM, _ACK, _END_HEADERS = 1, 1, 4
_CANCEL = 8
_INITIAL_WINDOW_SIZE = 4


def message(data: bytes) -> bytes:
    """A gRPC message with its prefix."""
    return struct.pack(">BI", 0, len(data)) + data


class RawClient:
    """One connection. Calls are numbered 1, 3, 5, ... in the order in which they are begun.

    `window` is the flow-control window of each call in bytes.
    """

    def __init__(self, address: str, *, window: int = 65535) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), PATIENCE)
        settings = struct.pack(">HI", _INITIAL_WINDOW_SIZE, window)
        self._socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(_SETTINGS, 0, 0, settings))

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
        self._socket.sendall(_frame(_DATA, _END_STREAM if last else 0, call, data))

    def cancel(self, call: int) -> None:
        """The call is over, the connection is not."""
        self._socket.sendall(_frame(_RST_STREAM, 0, call, struct.pack(">I", _CANCEL)))

    def leave(self) -> None:
        """Nothing more is sent or read."""
        self._socket.close()

    def ping(self, content: bytes) -> None:
        """Send a PING of eight bytes and read until it is acknowledged."""
        self._socket.sendall(_frame(_PING, 0, 0, content))
        while self._next_frame() != (_PING, _ACK, 0, content):
            pass

    def await_data(self, call: int) -> None:
        """Read until a part of a response has come. No room is made for more than HTTP/2's first 64 KiB."""
        while self._next_frame()[::2] != (_DATA, call):
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
            assert part, "the server has closed the connection"
            data += part
        return data


def _frame(kind: int, flags: int, call: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, call) + payload
