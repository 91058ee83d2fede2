"""Client that resets its connection (RST, not FIN) at a chosen step of a call."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Mapping

from fuzz.attackers.raw import Connection, abort, framed, headers_of
from polling import PATIENCE

Wrap = Callable[[socket.socket], socket.socket]

STEPS = (
    "connect", "settings", "acknowledgement", "headers", "part of the message", "message", "part of the response", "trailers",
)  # fmt: skip

# Less than the window of a server, so that it is sent at once.
_PART = 10_000
# Errors of a client whose connection the server has closed.
_CLOSED = (BrokenPipeError, ConnectionResetError, ssl.SSLError)


def plain(bare: socket.socket) -> socket.socket:
    """Wrap a connection in nothing."""
    return bare


class ResettingClient:
    """Client that begins a call on each connection and resets the connection after a step.

    The response must be larger than the window of 64 KiB for the step "part of the response".
    """

    def __init__(self, address: str, message: bytes, wrap: Wrap = plain) -> None:
        self._address, self._wrap = address, wrap
        body = framed(message)
        self._acts: Mapping[str, Callable[[Connection], object]] = {
            "acknowledgement": lambda client: client.read(),
            "headers": lambda client: client.begin(headers_of()),
            "part of the message": lambda client: client.send(1, body[:_PART]),
            "message": lambda client: client.send_all(1, body[_PART:]),
            "part of the response": _await_data,
            "trailers": lambda client: client.await_answers([1]),
        }

    def connect(self, last: str) -> Connection | None:
        """Begin a call up to a step; None if the server closed the connection before."""
        try:
            client = Connection(self._address, PATIENCE, window=1 << 30, wrap=self._wrap)
        except _CLOSED:
            return None
        for step in STEPS[2 : STEPS.index(last) + 1]:
            try:
                self._acts[step](client)
                client.flush()
            except _CLOSED:
                client.closed = True
            if client.closed:
                abort(client.socket)
                return None
        return client

    def reset_after(self, step: str) -> bool:
        """Open a connection and reset it after a step; return False if the server closed it before."""
        if step == "connect":
            abort(Connection.raw(self._address, PATIENCE))
            return True
        client = self.connect(step)
        if client is not None:
            abort(client.socket)
        return client is not None


def _await_data(client: Connection) -> None:
    while not (client.answers[1].data or client.closed):
        client.read()
