"""What a server tells of itself over HTTP, on a port of its own: metrics, health, and pages for people."""

from __future__ import annotations

import io
import ipaddress
import logging
import socket
import socketserver
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from tensorferry.batcher.supervision import supervise
from tensorferry.server.errors import StartError
from tensorferry.server.monitoring.http_connections import HttpConnections, TimedReader

_log = logging.getLogger("tensorferry.server")

PATH = "/metrics"
TEXT = "text/plain; charset=utf-8"

# Of the header Accept: a page and its content type.
PageRenderer: TypeAlias = Callable[[str], tuple[bytes, str]]

# Within so many seconds a request must have arrived, and its answer been taken.
_REQUEST_SECONDS = 10.0
# Each connection has a thread.
_MOST_CONNECTIONS = 256
_MOST_PER_ADDRESS = 64
# After a failure, so many seconds until it goes on.
_AGAIN_SECONDS = 0.1

# Nothing that is sent may be shown as part of another site, nor run what it may contain.
_SAFETY: Mapping[str, str] = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """What is sent for a path; `headers` besides, or instead of, those that every answer has."""

    body: bytes
    content_type: str
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Route:
    """Makes the answer of each request from its header Accept."""

    answer: Callable[[str], HttpResponse]


class MetricsServer:
    """Answers GET /metrics with a page, which is made anew each time, and GET of each of the `routes`, until `close`.

    Listens from the start; StartError when the address cannot be had. Thread-safe.
    """

    def __init__(
        self, host: str, port: int, page: PageRenderer, routes: Mapping[str, Route] | None = None
    ) -> None:
        bare = host.strip("[]")
        every = {PATH: Route(lambda accept: HttpResponse(*page(accept))), **(routes or {})}
        try:
            family = socket.getaddrinfo(bare, port, type=socket.SOCK_STREAM)[0][0]
            self._server = _Server((bare, port), family, every)
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

    def __init__(self, address: tuple[str, int], family: socket.AddressFamily, routes: Mapping[str, Route]):
        self.address_family = family
        self.routes = routes
        self._ended = threading.Event()
        self._connections = HttpConnections(_MOST_CONNECTIONS, _MOST_PER_ADDRESS)
        super().__init__(address, _Handler)
        # Whether nobody else can connect.
        self.local = ipaddress.ip_address(str(self.server_address[0])).is_loopback

    def server_bind(self) -> None:
        # That of HTTPServer asks name servers for the host's full name, which nobody wants to know.
        socketserver.TCPServer.server_bind(self)

    def run(self) -> None:
        """Takes connections, one after the other, each into a thread of its own. Waits without polling."""
        supervise(self._take_until_ended, self._begin_again)
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

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give a connection a thread."""
        self._connections.admit(request, client_address[0])
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._connections.ended(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """On that thread: all of the connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.ended(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """That of the base class writes tracebacks to stderr, past the log, of whoever leaves amid an answer."""
        fault = sys.exception()
        if isinstance(fault, OSError):
            _log.debug("metrics: %s has left: %s", client_address[0], fault)
        else:
            _log.error("metrics: a connection from %s failed", client_address[0], exc_info=fault)

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

    def setup(self) -> None:
        """Bound the time of the whole request."""
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(TimedReader(self.connection, self.timeout))

    def do_GET(self) -> None:
        """What is at the path; 404 where nothing is."""
        routes = self.server.routes
        route = routes.get(self.path.partition("?")[0])
        if route is None:
            self.send_error(404, explain=f"there are {', '.join(routes)}")
        elif self.server.local and not _is_local(self.headers.get("Host", "localhost")):
            # DNS rebinding: a web site may have its name resolve to this machine, and a browser here would then let
            # that site read the answer.
            self.send_error(403, explain="ask for localhost or 127.0.0.1, or serve others by --metrics-host")
        else:
            try:
                answer = route.answer(", ".join(self.headers.get_all("Accept", [])))
            except Exception:
                _log.exception("%r could not be made; this is a bug in tensorferry", self.path)
                self.send_error(500, explain="the server's log says why")
                return
            self._send(answer)

    do_HEAD = do_GET  # noqa: N815 (the base class finds methods by these names)

    def do_POST(self) -> None:
        """Nothing can be changed here."""
        self._send(
            HttpResponse(
                b"405 Method Not Allowed: there are GET and HEAD\n", TEXT, 405, {"Allow": "GET, HEAD"}
            )
        )

    do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_POST  # noqa: N815

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Any error, the base class's too, as plain text."""
        said = explain or message
        text = f"{code} {HTTPStatus(code).phrase}{f': {said}' if said else ''}\n"
        self._send(HttpResponse(text.encode(errors="backslashreplace"), TEXT, code))

    def _send(self, answer: HttpResponse) -> None:
        self.connection.settimeout(self.timeout)
        self.send_response(answer.status)
        headers = {"Content-Type": answer.content_type, "Content-Length": str(len(answer.body))}
        for name, value in {**_SAFETY, **answer.headers, **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def log_message(self, format: str, *args: object) -> None:
        """A line a scrape, for those who look."""
        _log.debug("metrics: %s %s", self.address_string(), format % args)


def _is_local(host: str) -> bool:
    """Whether a Host header names this machine as only itself does."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
