"""The page of metrics over HTTP, on a port of its own."""

from __future__ import annotations

import logging
import socket
import socketserver
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tensorferry.batcher.lasting import last
from tensorferry.server.errors import StartError
from tensorferry.server.metrics import CONTENT_TYPE

_log = logging.getLogger("tensorferry.server")

PATH = "/metrics"

# Who connects and then says nothing does not keep a thread for longer.
_REQUEST_SECONDS = 10.0
# After a failure, so many seconds until it goes on.
_AGAIN_SECONDS = 0.1


class MetricsServer:
    """Answers GET /metrics with a page, which is made anew each time, until `close`.

    Listens from the start; StartError when the address cannot be had. Thread-safe.
    """

    def __init__(self, host: str, port: int, page: Callable[[], bytes]) -> None:
        bare = host.strip("[]")
        try:
            family = socket.getaddrinfo(bare, port, type=socket.SOCK_STREAM)[0][0]
            self._server = _Server((bare, port), family, page)
        except OSError as error:
            raise StartError(
                f"cannot serve metrics on {host} port {port}: {error}; "
                "choose others by --metrics-host and --metrics-port (0 picks a free port)"
            ) from None
        shown = f"[{bare}]" if ":" in bare else bare
        self.url = f"http://{shown}:{self._server.server_address[1]}{PATH}"
        self._thread = threading.Thread(target=self._server.run, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends it; answers that are being sent go on. Idempotent."""
        self._server.end()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    # A scrape that hangs must not keep the process.
    daemon_threads = True

    def __init__(self, address: tuple[str, int], family: socket.AddressFamily, page: Callable[[], bytes]):
        self.address_family = family
        self.page = page
        self._ended = threading.Event()
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        # That of HTTPServer asks name servers for the host's full name, which nobody wants to know.
        socketserver.TCPServer.server_bind(self)

    def run(self) -> None:
        """Takes connections, one after the other, each into a thread of its own. Waits without polling."""
        last(self._take_until_ended, self._begin_again)
        self.server_close()

    def _take_until_ended(self) -> None:
        while not self._ended.is_set():
            self.handle_request()

    def _begin_again(self, fault: BaseException) -> None:
        _log.error("the thread of the metrics ended unexpectedly; it is begun again", exc_info=fault)
        self._ended.wait(_AGAIN_SECONDS)

    def get_request(self) -> tuple[socket.socket, Any]:
        """The next connection. Where the process has no file left for it, it waits, rather than ask without end."""
        try:
            return super().get_request()
        except OSError:
            self._ended.wait(_AGAIN_SECONDS)
            raise

    def end(self) -> None:
        self._ended.set()
        try:
            # Wakes the thread that waits for a connection.
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            # It was ended before.
            pass


class _Handler(BaseHTTPRequestHandler):
    timeout = _REQUEST_SECONDS
    server: _Server
    server_version = "tensorferry"
    sys_version = ""

    def do_GET(self) -> None:
        """The page; 404 for any other path."""
        if self.path.partition("?")[0] != PATH:
            self.send_error(404, explain=f"there is {PATH} alone")
            return
        try:
            page = self.server.page()
        except Exception:
            _log.exception("the metrics could not be collected; this is a bug in tensorferry")
            self.send_error(500)
            return
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, format: str, *args: object) -> None:
        """A line a scrape, for those who look."""
        _log.debug("metrics: %s %s", self.address_string(), format % args)
