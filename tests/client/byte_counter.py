"""A TCP proxy that counts the bytes that clients send."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class ByteCounter:
    """A proxy of 127.0.0.1 in front of one server. `sent` is final after the `with`."""

    def __init__(self, listening: socket.socket, server: tuple[str, int]) -> None:
        self.sent = 0
        self.target = f"127.0.0.1:{listening.getsockname()[1]}"
        self._listening = listening
        self._server = server
        # Guards sent and _sockets.
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    @classmethod
    @contextmanager
    def to(cls, target: str) -> Iterator[ByteCounter]:
        host, _, port = target.rpartition(":")
        with socket.create_server(("127.0.0.1", 0)) as listening:
            counter = cls(listening, (host, int(port)))
            accepting = threading.Thread(target=counter._accept, name="byte-counter")
            accepting.start()
            try:
                yield counter
            finally:
                listening.shutdown(socket.SHUT_RDWR)
                accepting.join(10)
                for one in counter._sockets:
                    with suppress(OSError):
                        one.shutdown(socket.SHUT_RDWR)
                for thread in counter._threads:
                    thread.join(10)
                for one in counter._sockets:
                    one.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                server = socket.create_connection(self._server)
                with self._lock:
                    self._sockets += [client, server]
                for source, sink, counted in ((client, server, True), (server, client, False)):
                    thread = threading.Thread(target=self._copy, args=(source, sink, counted))
                    self._threads.append(thread)
                    thread.start()

    def _copy(self, source: socket.socket, sink: socket.socket, counted: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if counted:
                    with self._lock:
                        self.sent += len(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
