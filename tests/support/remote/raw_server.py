"""Server that sends bytes as a test gives them, and then nothing."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def raw_server(answer: bytes) -> Iterator[str]:
    """Send an answer to each connection, which stays open. Yield the server's address."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        done = threading.Event()

        def serve() -> None:
            connections = []
            while not done.is_set():
                connection, _ = server.accept()
                connections.append(connection)
                if not done.is_set():
                    connection.recv(65536)
                    connection.sendall(answer)
            for connection in connections:
                connection.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
        finally:
            done.set()
            socket.create_connection(server.getsockname()).close()
            thread.join()
