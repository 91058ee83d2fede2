"""Pages on a separate port: metrics, health and status."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import TypeAlias

from tensorferry.server.system.addresses import names_this_machine
from tensorferry.server.system.threads import HandlerThreads, ThreadKind
from tensorferry.server.transport.http.answers import error_response, response
from tensorferry.server.transport.http.connection import Connection, Exchange
from tensorferry.server.transport.http.errors import ErrorBody, HttpError
from tensorferry.server.transport.http.heads import Head, Routed
from tensorferry.server.transport.http.server import ConnectionLimits, HttpServer
from tensorferry.server.transport.unread_responses import UnreadResponses

_log = logging.getLogger("tensorferry.server")

PATH = "/metrics"

# Function from the header Accept to a page and its content type.
PageRenderer: TypeAlias = Callable[[str], tuple[bytes, str]]

_LIMITS = ConnectionLimits(most=256, most_per_address=64, unfinished=True)
_MAX_BODY_BYTES = 64 << 10
# Pages that are made at the same time.
_THREADS = 4
# Time for open connections to end, at the end of the server.
_LAST_SECONDS = 1.0

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
    """Serves /metrics, with a page that is rendered for each request, and further `routes`.

    It accepts connections of the listening socket, which it owns, from construction until `close`. Thread-safe. Processes
    may share the socket.
    """

    def __init__(
        self, listening: socket.socket, page: PageRenderer, routes: Mapping[str, Route] | None = None
    ) -> None:
        all_routes = {PATH: lambda accept: HttpResponse(*page(accept)), **(routes or {})}
        # Whether only this machine can connect.
        local = ipaddress.ip_address(listening.getsockname()[0]).is_loopback
        self._server = HttpServer(
            listening,
            partial(_Pages, all_routes, local),
            unread=UnreadResponses(),
            limits=_LIMITS,
            name="metrics",
            kind=ThreadKind.RESTARTED,
        )
        self.url = f"{self._server.url}{PATH}"
        self._server.start()

    def close(self) -> None:
        """Accept no more connections; other processes may still do that on copies of the socket. Idempotent.

        Open connections have a second to end.
        """
        self._server.begin_drain()
        self._server.close(time.monotonic() + _LAST_SECONDS)


class _Pages:
    """Serves pages, each made on a thread of its own. See `Application`."""

    def __init__(
        self,
        routes: Mapping[str, Route],
        local: bool,
        loop: asyncio.AbstractEventLoop,
        on_loop: Callable[[Callable[[], None]], None],
    ) -> None:
        self._routes, self._local, self._on_loop = routes, local, on_loop
        self._threads = HandlerThreads(_THREADS, "metrics-page")

    def route(self, method: str, path: str, fields: Mapping[str, str]) -> Routed:
        """Return the page of a request."""
        target: Route | HttpError | None = self._routes.get(path)
        if method not in ("GET", "HEAD"):
            target = HttpError(405, "there are GET and HEAD", headers="Allow: GET, HEAD\r\n")
        elif target is None:
            target = HttpError(404, f"there are {', '.join(self._routes)}")
        elif self._local and not names_this_machine(fields.get("host", "localhost")):
            # DNS rebinding: a web site can make its name resolve to this machine, so that a browser here would let the
            # site read the response.
            target = HttpError(403, "use localhost or 127.0.0.1 as host, or set --metrics-host")
        return Routed(target, _as_text)

    def max_body_bytes(self, head: Head) -> int:
        """Return the bytes of the largest body, which means nothing here."""
        return _MAX_BODY_BYTES

    def refusal(self, connection: Connection, head: Head) -> HttpError | None:
        """Return why a request is refused before its body."""
        return head.target if isinstance(head.target, HttpError) else None

    def serve(self, exchange: Exchange, body: bytes) -> None:
        """Answer a request later, because a page can take long."""
        target = exchange.head.target
        if isinstance(target, HttpError):
            exchange.respond(error_response(target, _as_text))
        else:
            self._threads.submit(self._respond, exchange, target)

    def _respond(self, exchange: Exchange, page: Route) -> None:
        head = exchange.head
        try:
            made = page(", ".join(str(value) for name, value in head.fields if name == "accept"))
        except Exception:
            _log.exception("the page %r failed; this is a bug in tensorferry", head.path)
            data = error_response(HttpError(500, "see the server's log"), _as_text)
        else:
            data = response(made.status, made.body, made.content_type, _lines({**_SAFETY, **made.headers}))
        self._on_loop(partial(exchange.respond, data))

    def close(self) -> None:
        """End the threads, without waiting for a page that hangs."""
        self._threads.shutdown(wait=False)


def _as_text(error: HttpError) -> ErrorBody:
    text = f"{error.status} {HTTPStatus(error.status).phrase}: {error}\n"
    return ErrorBody(error.status, text, error.headers + _lines(_SAFETY))


def _lines(headers: Mapping[str, str]) -> str:
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items())
