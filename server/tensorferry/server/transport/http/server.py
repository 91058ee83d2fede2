"""An HTTP server: one thread with an event loop, on which its application answers requests."""

from __future__ import annotations

import asyncio
import logging
import math
import resource
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from tensorferry.batcher.supervision import RestartBackoff
from tensorferry.server.security.tls import TlsFiles
from tensorferry.server.system.threads import ThreadKind, new_thread
from tensorferry.server.transport.http.connection import Connection, Exchange
from tensorferry.server.transport.http.errors import HttpError
from tensorferry.server.transport.http.heads import Head, HeadCache, Routed
from tensorferry.server.transport.unread_responses import UnreadResponses

_log = logging.getLogger("tensorferry.server")

_SWEEP_SECONDS = 1.0
_BACKLOG = 1024
_HANDSHAKE_SECONDS = 10.0


class Application(Protocol):
    """What an HTTP server serves. All methods but `close` are called on the loop's thread."""

    def max_body_bytes(self, head: Head) -> int:
        """Return the bytes of the largest body that is read after this head."""

    def route(self, method: str, path: str, fields: Mapping[str, str]) -> Routed:
        """Return what serves a request. See `Router`."""

    def refusal(self, connection: Connection, head: Head) -> HttpError | None:
        """Return why a request is refused whatever its body is, so that the body is not kept."""

    def serve(self, exchange: Exchange, body: bytes) -> None:
        """Answer a request, at once or later."""

    def close(self) -> None:
        """End its threads. Called on any thread, after the loop has ended."""


# Makes the application for the loop and the function that calls another on the loop's thread.
MakeApplication = Callable[[asyncio.AbstractEventLoop, Callable[[Callable[[], None]], None]], Application]


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The most open connections, of all clients and of one address; 0: of all as the files allow, of one as of all.

    A connection beyond them is admitted, and the oldest idle one of the same address, or of the address with most, is
    closed. So clients that keep connections open cannot block others. With `unfinished`, a connection counts as idle while
    its request arrives, too.
    """

    most: int = 0
    most_per_address: int = 0
    unfinished: bool = False


_NO_LIMITS = ConnectionLimits()


class HttpServer:
    """Serves an application over HTTP/1.1 on a listening socket, which it owns. Call `start`, `begin_drain` and `close` once each.

    `unread` counts answers that clients have not read. `grpc_address` returns where gRPC is served, for clients that take this
    port for it.
    """

    def __init__(
        self,
        listening: socket.socket,
        make: MakeApplication,
        *,
        unread: UnreadResponses,
        tls: TlsFiles | None = None,
        limits: ConnectionLimits = _NO_LIMITS,
        grpc_address: Callable[[], str] = lambda: "another port",
        name: str = "http",
        kind: ThreadKind = ThreadKind.ESSENTIAL,
    ) -> None:
        self._listening = listening
        self._tls = tls
        self.grpc_address = grpc_address
        self.unread = unread
        # No more than half of the files, so that gRPC and the loading of models keep the others.
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._limits = limits
        self._most = limits.most or (math.inf if files < 0 else files // 2)
        # Whether each connection is closed after its next answer.
        self.draining = False
        # All fields below belong to the loop's thread.
        self._loop = asyncio.new_event_loop()
        self.application = make(self._loop, self.on_loop)
        self.heads = HeadCache(self.application.route)
        # The oldest first.
        self._connections: dict[Connection, None] = {}
        self._per_address: Counter[str] = Counter()
        self._accepting: asyncio.Server | None = None
        self._drains = self._closing = False
        self._sent = threading.Event()
        self._started = threading.Event()
        self._backoff = RestartBackoff()
        self._thread = new_thread(name, self._run, kind, backoff=self._backoff)

    @property
    def url(self) -> str:
        """The URL of the server."""
        host, port = self._listening.getsockname()[:2]
        name = f"[{host}]" if ":" in host else host
        return f"{'http' if self._tls is None else 'https'}://{name}:{port}"

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return len(self._connections)

    def start(self) -> None:
        """Accept connections."""
        self._thread.start()
        self._started.wait()

    def _run(self) -> None:
        loop, tls = self._loop, self._tls
        loop.set_exception_handler(_log_unexpected)
        self._accepting = loop.run_until_complete(
            loop.create_server(
                lambda: Connection(self),
                sock=self._listening,
                ssl=None if tls is None else _CurrentContext(tls),
                # Also the number of connections that asyncio accepts at once, which other processes then do not get.
                backlog=1,
                ssl_handshake_timeout=None if tls is None else _HANDSHAKE_SECONDS,
            )
        )
        self._listening.listen(_BACKLOG)
        loop.call_later(_SWEEP_SECONDS, self._sweep)
        self._started.set()
        loop.run_forever()
        for connection in list(self._connections):
            connection.abort()
        # Runs the callbacks of the connections that end.
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()

    def _sweep(self) -> None:
        self._loop.call_later(_SWEEP_SECONDS, self._sweep)
        now = time.monotonic()
        for connection in list(self._connections):
            connection.sweep(now)
        if self._drains:
            self._end_idle()
        if self._closing:
            self._report_sent()

    def on_loop(self, call: Callable[[], None]) -> None:
        """Call a function on the loop's thread, unless it has ended. Thread-safe."""
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            # The loop is closed, and every connection with it.
            return

    def opened(self, connection: Connection) -> bool:
        """Count a connection, and close another if there are too many; return False if there is none to close."""
        self._connections[connection] = None
        self._per_address[connection.address] += 1
        if self._per_address[connection.address] > (self._limits.most_per_address or math.inf):
            crowded = connection.address
        elif len(self._connections) > self._most:
            ((crowded, _),) = self._per_address.most_common(1)
        else:
            return True
        for other in self._connections:
            idle = not other.busy and (other.idle or self._limits.unfinished)
            if other.address == crowded and idle and other is not connection:
                self._forget(other)
                other.abort()
                return True
        return False

    def closed(self, connection: Connection) -> None:
        """Stop counting a connection."""
        self._forget(connection)
        if self._closing:
            self._report_sent()

    def _forget(self, connection: Connection) -> None:
        if connection in self._connections:
            del self._connections[connection]
            self._per_address[connection.address] -= 1
            if not self._per_address[connection.address]:
                del self._per_address[connection.address]

    def announce_shutdown(self) -> None:
        """Close each connection after its next answer from now on, so that `begin_drain` closes none that a client uses.

        Others are accepted, because health is asked on new ones.
        """
        self.draining = True

    def begin_drain(self) -> None:
        """Accept no more connections, close idle ones, and the others after their next answer."""
        self.on_loop(self._begin_drain)

    def _begin_drain(self) -> None:
        self.draining = self._drains = True
        if self._accepting is not None:
            self._accepting.close()
        self._end_idle()

    def _end_idle(self) -> None:
        for connection in list(self._connections):
            connection.end_if_idle()

    def close(self, deadline: float) -> None:
        """Close every connection once its answer is sent, or at `deadline`, and end the thread. Idempotent."""
        self._backoff.end()
        if self._thread.is_alive():
            self.on_loop(self._begin_close)
            self._sent.wait(max(0.0, deadline - time.monotonic()))
            self.on_loop(self._loop.stop)
            self._thread.join()
        self._listening.close()
        self.application.close()

    def _begin_close(self) -> None:
        self._closing = True
        self._report_sent()

    def _report_sent(self) -> None:
        if not any(connection.busy or connection.is_new for connection in self._connections):
            self._sent.set()


class _CurrentContext(ssl.SSLContext):
    """A TLS context that makes each connection by the one that is current, because files can change."""

    _files: TlsFiles

    def __new__(cls, files: TlsFiles) -> _CurrentContext:
        made = super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)
        made._files = files
        return made

    def wrap_bio(self, *arguments: Any, **named: Any) -> ssl.SSLObject:
        """Return a connection."""
        return self._files.context().wrap_bio(*arguments, **named)


def _log_unexpected(loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
    """Log what a callback of the loop raised. A broken connection is no error of the server."""
    error = context.get("exception")
    if isinstance(error, (OSError, ssl.SSLError)):
        _log.debug("http: a connection failed: %r", error)
    else:
        _log.error("unexpected error in the HTTP server (bug): %s", context.get("message"), exc_info=error)
