"""Client that resets its connection (RST, not FIN) at a chosen step of a call."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Sequence

from support.server.raw_h2 import UNARY, RawClient, Wrap, reset
from support.server.raw_h2 import message as framed

STEPS = (
    "connect", "settings", "acknowledgement", "headers", "half of the message", "message", "half of the response", "trailers",
)  # fmt: skip

# Errors of a client whose connection the server has closed.
_CLOSED = (BrokenPipeError, ConnectionResetError, EOFError, ssl.SSLError)


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

    def __init__(self, address: str, message: bytes, wrap: Wrap = lambda bare: bare) -> None:
        self._address = address
        self._wrap = wrap
        body = framed(message)
        half = len(body) // 2
        self._steps: Sequence[Callable[[RawClient], None]] = (
            lambda client: client.acknowledge(),
            lambda client: client.begin(1, UNARY),
            lambda client: client.send(1, body[:half]),
            lambda client: client.send(1, body[half:], last=True),
            lambda client: client.await_data(1),
            lambda client: client.await_end(1),
        )

    def open(self) -> RawClient:
        """Return a connection with exchanged SETTINGS; ConnectionClosedError if the server closed it."""
        return self._run("acknowledgement")

    def reset_after(self, step: str) -> None:
        """Open a connection and reset it after a step; ConnectionClosedError if the server closed it before."""
        if step != "connect":
            self._run(step).reset()
            return
        host, _, port = self._address.rpartition(":")
        reset(socket.create_connection((host, int(port))))

    def _run(self, last: str) -> RawClient:
        try:
            client = RawClient(self._address, window=1 << 30, wrap=self._wrap)
        except _CLOSED as error:
            raise ConnectionClosedError from error
        try:
            for step in self._steps[: STEPS.index(last) - 1]:
                step(client)
        except _CLOSED as error:
            client.reset()
            raise ConnectionClosedError from error
        return client
