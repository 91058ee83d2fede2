"""Server that sends bytes as a test gives them, and then nothing."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class RawServer:
    """Sends an answer to each connection, which stays open until `close`."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def _serve(self) -> None:
        connections = []
        while not self._closed.is_set():
            connection, _ = self._listener.accept()
            connections.append(connection)
            if not self._closed.is_set():
                connection.recv(65536)
                connection.sendall(self._answer)
        for connection in connections:
            connection.close()

    def close(self) -> None:
        if not self._closed.is_set():
            self._closed.set()
            socket.create_connection(self._listener.getsockname()).close()
            self._thread.join()
            self._listener.close()


@contextmanager
def raw_server(answer: bytes) -> Iterator[RawServer]:
    """Run a server."""
    server = RawServer(answer)
    try:
        yield server
    finally:
        server.close()
