"""HTTP server on a separate port for metrics, health and the status page."""

from __future__ import annotations

import io
import ipaddress
import logging
import selectors
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeAlias

from tensorferry.batcher.supervision import RestartBackoff
from tensorferry.server.observability.monitoring.http_connections import HttpConnections, TimedReader
from tensorferry.server.system.addresses import address_of, names_this_machine
from tensorferry.server.system.threads import ThreadKind, new_thread

_log = logging.getLogger("tensorferry.server")

PATH = "/metrics"
TEXT = "text/plain; charset=utf-8"

# Function from the header Accept to a page and its content type.
PageRenderer: TypeAlias = Callable[[str], tuple[bytes, str]]

# Limit for a request to arrive, and for its response to be read.
_REQUEST_SECONDS = 10.0
# Limits for connections, because each has a thread.
_MAX_CONNECTIONS = 256
_MAX_PER_ADDRESS = 64
# Time for open connections to end, at the end of the server.
_LAST_SECONDS = 1.0
# Delay after a connection could not be accepted.
_ACCEPT_RETRY_SECONDS = 0.1

# Headers against embedding in other sites and against scripts in the content.
_SAFETY: Mapping[str, str] = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """Response for a path. `headers` are added to, or replace, the headers of every response."""

    body: bytes
    content_type: str
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


# Function from the header Accept to the response.
Route: TypeAlias = Callable[[str], HttpResponse]


class MetricsServer:
    """HTTP server for /metrics, with a page that is rendered for each request, and for further `routes`.

    It accepts connections of the listening socket, which it owns, from construction until `close`. Thread-safe. Processes
    may share the socket.
    """

    def __init__(
        self, listening: socket.socket, page: PageRenderer, routes: Mapping[str, Route] | None = None
    ) -> None:
        all_routes = {PATH: lambda accept: HttpResponse(*page(accept)), **(routes or {})}
        self._server = _Server(listening, all_routes)
        self.url = f"http://{address_of(*listening.getsockname()[:2])}{PATH}"
        self._thread = new_thread(
            "metrics", self._server.run, ThreadKind.RESTARTED, backoff=self._server.backoff
        )
        self._thread.start()

    def close(self) -> None:
        """Accept no more connections; other processes may still do that on copies of the socket. Idempotent.

        Open connections have a second to end.
        """
        self._server.end()
        self._thread.join()
        self._server.await_connections(_LAST_SECONDS)


class _Server(ThreadingHTTPServer):
    # A hanging scrape must not keep the process alive.
    daemon_threads = True

    def __init__(self, listening: socket.socket, routes: Mapping[str, Route]):
        self.routes = routes
        self._ended = threading.Event()
        self.backoff = RestartBackoff()
        self._connections = HttpConnections(_MAX_CONNECTIONS, _MAX_PER_ADDRESS)
        address = listening.getsockname()
        super().__init__(address, _Handler, bind_and_activate=False)
        # The base class has made one of its own.
        self.socket.close()
        # Another process may accept a connection first.
        listening.setblocking(False)
        self.socket = listening
        self._woken, self._wake = socket.socketpair()
        # Whether only this machine can connect.
        self.local = ipaddress.ip_address(address[0]).is_loopback

    def run(self) -> None:
        """Accept connections until `end`, each with its own thread. Waits without polling."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.socket, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while selector.select() and not self._ended.is_set():
                self._handle_request_noblock()  # type: ignore[attr-defined]
        self._woken.close()
        self.server_close()

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection. If that fails, for example without a free file descriptor, wait before the next try."""
        try:
            return super().get_request()
        except BlockingIOError:
            raise
        except OSError:
            self._ended.wait(_ACCEPT_RETRY_SECONDS)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for a connection."""
        self._connections.admit(request, client_address[0])
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._connections.ended(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection on its thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.ended(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an exception. The base class would print a traceback to stderr when a client disconnects."""
        fault = sys.exception()
        if isinstance(fault, OSError):
            _log.debug("metrics: %s has disconnected: %s", client_address[0], fault)
        else:
            _log.error("metrics: a connection from %s failed", client_address[0], exc_info=fault)

    def end(self) -> None:
        self._ended.set()
        self.backoff.end()
        # Wakes the accepting thread.
        self._wake.close()

    def await_connections(self, seconds: float) -> None:
        """Wait until no connection is open, at most this long."""
        self._connections.await_none(seconds)


class _Handler(BaseHTTPRequestHandler):
    timeout = _REQUEST_SECONDS
    server: _Server
    server_version = "tensorferry"
    sys_version = ""

    def setup(self) -> None:
        """Limit the time of the whole request."""
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(TimedReader(self.connection, self.timeout))

    def do_GET(self) -> None:
        """Serve a route, or 404."""
        routes = self.server.routes
        route = routes.get(self.path.partition("?")[0])
        if route is None:
            self.send_error(404, explain=f"there are {', '.join(routes)}")
        elif self.server.local and not names_this_machine(self.headers.get("Host", "localhost")):
            # DNS rebinding: a web site can make its name resolve to this machine, so that a browser here would let the
            # site read the response.
            self.send_error(403, explain="use localhost or 127.0.0.1 as host, or set --metrics-host")
        else:
            try:
                response = route(", ".join(self.headers.get_all("Accept", [])))
            except Exception:
                _log.exception("the page %r failed; this is a bug in tensorferry", self.path)
                self.send_error(500, explain="see the server's log")
                return
            self._send(response)

    do_HEAD = do_GET  # noqa: N815 (the base class finds methods by these names)

    def do_POST(self) -> None:
        """Refuse other methods."""
        self._send(
            HttpResponse(
                b"405 Method Not Allowed: there are GET and HEAD\n", TEXT, 405, {"Allow": "GET, HEAD"}
            )
        )

    do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_POST  # noqa: N815

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send any error, also of the base class, as plain text."""
        detail = explain or message
        text = f"{code} {HTTPStatus(code).phrase}{f': {detail}' if detail else ''}\n"
        self._send(HttpResponse(text.encode(errors="backslashreplace"), TEXT, code))

    def _send(self, response: HttpResponse) -> None:
        self.connection.settimeout(self.timeout)
        self.send_response(response.status)
        headers = {"Content-Type": response.content_type, "Content-Length": str(len(response.body))}
        for name, value in {**_SAFETY, **response.headers, **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(response.body)

    def log_message(self, format: str, *args: object) -> None:
        """Log each request at debug level."""
        _log.debug("metrics: %s %s", self.address_string(), format % args)
