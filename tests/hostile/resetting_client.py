"""Client of raw HTTP/2 frames that resets its connection (RST, not FIN) at a chosen step of a call."""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import Callable, Sequence

import hpack
from fuzz.attackers.attacks import DATA, END_HEADERS, END_STREAM, HEADERS, SETTINGS, frame
from fuzz.attackers.raw import framed, headers_of

STEPS = (
    "connect", "preface", "settings", "acknowledgement", "headers", "half of the message", "message",
    "half of the response", "trailers",
)  # fmt: skip
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_PATIENCE = 60.0
_FRAME_BYTES = 16384
# The flag of a SETTINGS frame that acknowledges the peer's.
_ACK = 1
_WINDOW = 4

# Errors of a client whose connection the server has closed.
_CLOSED = (BrokenPipeError, ConnectionResetError, EOFError, ssl.SSLError)

Wrap = Callable[[socket.socket], socket.socket]


class ConnectionClosedError(Exception):
    """The server closed the connection before the step of the reset."""


def tls_wrapper(context: ssl.SSLContext) -> Wrap:
    """Return a function that wraps a connection in TLS, as a gRPC client does."""
    context.set_alpn_protocols(["h2"])
    return lambda bare: context.wrap_socket(bare, server_hostname="localhost")


class ResettingClient:
    """Client that begins a call on each connection and resets the connection after a step.

    The response must be larger than the window of 64 KiB for the step "half of the response".
    """

    def __init__(self, address: str, message: bytes, wrap: Wrap | None = None) -> None:
        host, _, port = address.rpartition(":")
        self._address = host, int(port)
        self._body = framed(message)
        self._wrap = wrap

    def open(self) -> socket.socket:
        """Return a connection with exchanged SETTINGS; ConnectionClosedError if the server closed it."""
        connection = self._connect()
        try:
            self._run_steps(connection, STEPS.index("acknowledgement"))
        except _CLOSED as error:
            connection.close()
            raise ConnectionClosedError from error
        return connection

    def reset_after(self, step: str) -> None:
        """Open a connection and reset it after a step; ConnectionClosedError if the server closed it before."""
        if step == "connect":
            _reset(socket.create_connection(self._address, _PATIENCE))
            return
        connection = self._connect()
        try:
            self._run_steps(connection, STEPS.index(step))
        except _CLOSED as error:
            raise ConnectionClosedError from error
        finally:
            _reset(connection)

    def _connect(self) -> socket.socket:
        bare = socket.create_connection(self._address, _PATIENCE)
        try:
            return bare if self._wrap is None else self._wrap(bare)
        except _CLOSED as error:
            bare.close()
            raise ConnectionClosedError from error

    def _run_steps(self, connection: socket.socket, last: int) -> None:
        connection.sendall(_PREFACE)
        steps: Sequence[Callable[[socket.socket], None]] = (
            self._send_settings, self._acknowledge, self._send_headers, self._send_half, self._send_rest,
            self._read_half, self._read_trailers,
        )  # fmt: skip
        for step in steps[: last - 1]:
            step(connection)

    def _send_settings(self, connection: socket.socket) -> None:
        window = 1 << 30
        connection.sendall(frame(SETTINGS, 0, 0, struct.pack(">HI", _WINDOW, window)))

    def _acknowledge(self, connection: socket.socket) -> None:
        while _read_frame(connection)[0] != SETTINGS:
            pass
        connection.sendall(frame(SETTINGS, _ACK, 0))

    def _send_headers(self, connection: socket.socket) -> None:
        connection.sendall(frame(HEADERS, END_HEADERS, 1, hpack.Encoder().encode(headers_of())))

    def _send_half(self, connection: socket.socket) -> None:
        self._send(connection, self._body[: len(self._body) // 2], last=False)

    def _send_rest(self, connection: socket.socket) -> None:
        self._send(connection, self._body[len(self._body) // 2 :], last=True)

    def _send(self, connection: socket.socket, data: bytes, *, last: bool) -> None:
        for at in range(0, len(data), _FRAME_BYTES):
            piece = data[at : at + _FRAME_BYTES]
            end = END_STREAM if last and at + _FRAME_BYTES >= len(data) else 0
            connection.sendall(frame(DATA, end, 1, piece))

    def _read_half(self, connection: socket.socket) -> None:
        # The window of 64 KiB is not enlarged, so the server cannot send the rest.
        while True:
            kind, flags, _ = _read_frame(connection)
            if kind == DATA or (kind == HEADERS and flags & END_STREAM):
                return

    def _read_trailers(self, connection: socket.socket) -> None:
        connection.sendall(frame(8, 0, 0, struct.pack(">I", 1 << 30)))
        while True:
            kind, flags, _ = _read_frame(connection)
            if kind == HEADERS and flags & END_STREAM:
                return


def _reset(connection: socket.socket) -> None:
    """Close the connection by RST: SO_LINGER with time 0 discards unsent and unread bytes."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def _read_frame(connection: socket.socket) -> tuple[int, int, bytes]:
    header = _read(connection, 9)
    length = int.from_bytes(header[:3], "big")
    return header[3], header[4], _read(connection, length)


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data
