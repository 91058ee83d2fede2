"""A TCP proxy that counts the bytes that clients send."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class ByteCounter:
    """A proxy of 127.0.0.1 in front of one server. `sent` is final after the `with`."""

    def __init__(self, target: str) -> None:
        self.target = target
        # Guards `sent`.
        self._lock = threading.Lock()
        self.sent = 0

    @classmethod
    @contextmanager
    def to(cls, target: str) -> Iterator[ByteCounter]:
        host, _, port = target.rpartition(":")
        sockets: list[socket.socket] = []
        threads: list[threading.Thread] = []

        def accept() -> None:
            with suppress(OSError):
                while True:
                    client, _ = listening.accept()
                    server = socket.create_connection((host, int(port)))
                    sockets.extend((client, server))
                    for ways in ((client, server, True), (server, client, False)):
                        threads.append(threading.Thread(target=counter._copy, args=ways))
                        threads[-1].start()

        with socket.create_server(("127.0.0.1", 0)) as listening:
            counter = cls(f"127.0.0.1:{listening.getsockname()[1]}")
            accepting = threading.Thread(target=accept, name="byte-counter")
            accepting.start()
            try:
                yield counter
            finally:
                listening.shutdown(socket.SHUT_RDWR)
                accepting.join(10)
                for one in sockets:
                    with suppress(OSError):
                        one.shutdown(socket.SHUT_RDWR)
                for thread in threads:
                    thread.join(10)
                for one in sockets:
                    one.close()

    def _copy(self, source: socket.socket, sink: socket.socket, counted: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if counted:
                    with self._lock:
                        self.sent += len(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
