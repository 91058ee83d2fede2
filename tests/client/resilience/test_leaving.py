"""A stream whose server ends during a write gets an error and does not hang."""

from __future__ import annotations

import socket
import struct
import threading
from dataclasses import dataclass

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import numpy as np
import pytest
from client.conftest import streams_of

from tensorferry.client import Unavailable

PATIENCE = 30.0


@dataclass(frozen=True, slots=True)
class Leaving:
    """How a server leaves: `steps` in order, once `after` bytes of a call have come; 0 is with its headers.

    unlisten: nothing can connect any more. trailers: UNAVAILABLE, without anything before. refused: RST_STREAM with
    REFUSED_STREAM. goaway, goaway0: GOAWAY that includes the call, or not. flush: what there is so far goes out.
    close, reset: the connection ends, by FIN or by RST.
    """

    steps: tuple[str, ...]
    after: int = 1


LEAVINGS = [
    Leaving(("unlisten", "close")),
    Leaving(("unlisten", "trailers", "goaway", "close")),
    Leaving(("unlisten", "trailers", "reset")),
    Leaving(("unlisten", "refused", "flush", "close")),
    Leaving(("unlisten", "goaway0", "flush", "close")),
    Leaving(("trailers", "goaway", "close"), 0),
    Leaving(("goaway", "close"), 1000),
    Leaving(("trailers", "flush", "goaway")),
]


class LeavingServer:
    """Accept connections and end each call as the script says."""

    def __init__(self, leaving: Leaving) -> None:
        self._leaving = leaving
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.target = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._accepting = threading.Thread(target=self._accept, name="leaving", daemon=True)
        self._accepting.start()

    def close(self) -> None:
        """Accept no further connection."""
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._accepting.join(PATIENCE)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            if "unlisten" in self._leaving.steps:
                self._listener.close()
            threading.Thread(target=self._serve, args=(connection,), name="leaving", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        config = h2.config.H2Configuration(client_side=False, header_encoding=None)
        http = h2.connection.H2Connection(config)
        http.initiate_connection()
        received: dict[int, int] = {}
        try:
            connection.sendall(http.data_to_send())
            while data := connection.recv(1 << 16):
                for event in http.receive_data(data):
                    call: int = getattr(event, "stream_id", 0) or 0
                    if isinstance(event, h2.events.RequestReceived):
                        received[call] = 0
                    elif isinstance(event, h2.events.DataReceived):
                        http.acknowledge_received_data(event.flow_controlled_length or 0, call)
                        if call in received:
                            received[call] += len(event.data or b"")
                    if call in received and received[call] >= self._leaving.after:
                        del received[call]
                        self._leave(connection, http, call)
                connection.sendall(http.data_to_send())
        except (OSError, h2.exceptions.ProtocolError):
            pass
        finally:
            connection.close()

    def _leave(self, connection: socket.socket, http: h2.connection.H2Connection, call: int) -> None:
        for step in self._leaving.steps:
            match step:
                case "trailers":
                    headers = [(":status", "200"), ("content-type", "application/grpc")]
                    trailers = [("grpc-status", "14"), ("grpc-message", "leaving")]
                    http.send_headers(call, headers + trailers, end_stream=True)
                case "refused":
                    http.reset_stream(call, h2.errors.ErrorCodes.REFUSED_STREAM)
                case "goaway" | "goaway0":
                    http.close_connection(last_stream_id=call if step == "goaway" else 0)
                case "flush":
                    connection.sendall(http.data_to_send())
                case "reset":
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    raise ConnectionResetError
                case "close":
                    connection.sendall(http.data_to_send())
                    raise ConnectionAbortedError


@pytest.mark.parametrize("kind", ["threads", "asyncio"])
@pytest.mark.parametrize("leaving", LEAVINGS, ids=lambda leaving: "-".join(leaving.steps))
def test_a_stream_ends_when_its_server_leaves(leaving: Leaving, kind: str) -> None:
    server = LeavingServer(leaving)
    request = {"x": np.zeros(100, np.float32)}
    with streams_of(kind, server.target, check=False) as stream, pytest.raises(Unavailable):
        list(stream("m", [request] * (1 if leaving.after < 2 else 100), timeout=PATIENCE))
    server.close()
