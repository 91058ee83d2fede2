"""The HTTP server of a process: one thread with an event loop, which also runs short batches, as the lane's thread does."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import math
import resource
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tensorferry.server.inference.service import InferenceService
from tensorferry.server.security.tls import TlsFiles
from tensorferry.server.system.threads import ThreadKind, new_thread
from tensorferry.server.transport.http.answers import error_response, response_of
from tensorferry.server.transport.http.connection import Connection, Exchange
from tensorferry.server.transport.http.errors import HttpError
from tensorferry.server.transport.http.heads import HeadCache
from tensorferry.server.transport.http.inference_calls import InferenceCalls
from tensorferry.server.transport.http.method_calls import MethodCalls
from tensorferry.server.transport.http.routes import INFER
from tensorferry.server.transport.threaded_servicer import Extension
from tensorferry.server.transport.transport_state import TransportState

_log = logging.getLogger("tensorferry.server")

_SWEEP_SECONDS = 1.0
_BACKLOG = 1024
_HANDSHAKE_SECONDS = 10.0


class HttpServer:
    """Serves the protocol over HTTP/1.1 on a listening socket, which it owns. Call `start`, `begin_drain` and `close` once each.

    `extensions` implement all methods but inference, `shared` is that of all transports. `grpc_address` returns where gRPC is
    served, for clients that take this port for it. At most `max_connections` are open; 0: as the files allow.
    """

    def __init__(
        self,
        listening: socket.socket,
        service: InferenceService,
        extensions: Sequence[Extension],
        shared: TransportState,
        *,
        grpc_address: Callable[[], str],
        max_connections: int = 0,
    ) -> None:
        self._listening = listening
        self._service = service
        self._shared = shared
        self.grpc_address = grpc_address
        self.unread = shared.unread
        self.max_body_bytes = service.limits.message_bytes
        # No more than half of the files, so that gRPC and the loading of models keep the others.
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._max_connections = max_connections or (math.inf if files < 0 else files // 2)
        # Whether each connection is closed after its next answer.
        self.draining = False
        # All fields below belong to the loop's thread.
        self._loop = asyncio.new_event_loop()
        # Whether a web page can call this server by a name of its own that resolves to this machine.
        local = ipaddress.ip_address(listening.getsockname()[0]).is_loopback
        self.heads = HeadCache(local=local and shared.tls is None and not shared.requires_credentials)
        self._methods = MethodCalls(service, extensions, shared.access, self.on_loop)
        self._inferences = InferenceCalls(service, shared, self._methods, self._loop, self.on_loop)
        self.refusal = self._methods.refusal
        self._connections: set[Connection] = set()
        self._accepting: asyncio.Server | None = None
        self._closing = False
        self._sent = threading.Event()
        self._started = threading.Event()
        self._thread = new_thread("http", self._run, ThreadKind.ESSENTIAL)

    @property
    def url(self) -> str:
        """The URL of the server."""
        host, port = self._listening.getsockname()[:2]
        name = f"[{host}]" if ":" in host else host
        return f"{'http' if self._shared.tls is None else 'https'}://{name}:{port}"

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return len(self._connections)

    def start(self) -> None:
        """Accept connections."""
        self._thread.start()
        self._started.wait()

    def _run(self) -> None:
        loop, tls = self._loop, self._shared.tls
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

    def on_loop(self, call: Callable[[], None]) -> None:
        """Call a function on the loop's thread, unless it has ended. Thread-safe."""
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            # The loop is closed, and every connection with it.
            return

    def opened(self, connection: Connection) -> bool:
        """Count a connection; return False if there are too many."""
        self._connections.add(connection)
        return len(self._connections) <= self._max_connections

    def closed(self, connection: Connection) -> None:
        """Stop counting a connection."""
        self._connections.discard(connection)
        if self._closing:
            self._report_sent()

    def serve(self, exchange: Exchange, body: bytes) -> None:
        """Answer a request, at once or later."""
        target = exchange.head.target
        try:
            if isinstance(target, HttpError):
                # Not raised, because it would keep a traceback of each request.
                exchange.respond(error_response(target, exchange.head.errors))
            elif target.route.rpc == INFER:
                self._inferences.serve(exchange, target, body)
            else:
                self._methods.serve(exchange, target, body)
        except Exception as error:
            exchange.respond(response_of(error, self._service, exchange.head.errors))

    def announce_shutdown(self) -> None:
        """Close each connection after its next answer from now on, so that `begin_drain` closes none that a client uses.

        Others are accepted, because health is asked on new ones.
        """
        self.draining = True

    def begin_drain(self) -> None:
        """Accept no more connections, close idle ones, and the others after their next answer."""
        self.on_loop(self._begin_drain)

    def _begin_drain(self) -> None:
        self.draining = True
        if self._accepting is not None:
            self._accepting.close()
        for connection in list(self._connections):
            connection.end_if_idle()

    def close(self, deadline: float) -> None:
        """Close every connection once its answer is sent, or at `deadline`, and end the thread. Idempotent."""
        self._shared.calls.wait_until_none(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self.on_loop(self._begin_close)
            self._sent.wait(max(0.0, deadline - time.monotonic()))
            self.on_loop(self._loop.stop)
            self._thread.join()
        self._listening.close()
        self._inferences.close()
        self._methods.close()

    def _begin_close(self) -> None:
        self._closing = True
        self._report_sent()

    def _report_sent(self) -> None:
        if not any(connection.busy for connection in self._connections):
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
