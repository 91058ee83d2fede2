"""The HTTP server of a process: one thread with an event loop, which also runs short batches, as the lane's thread does."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any

from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.identity import CONTROL, CURRENT_CLIENT, ClientIdentity
from tensorferry.server.inference.interface import InlineRunner
from tensorferry.server.inference.reply import InferenceReply
from tensorferry.server.inference.service import InferenceService
from tensorferry.server.security.method_roles import HEALTH, required_role
from tensorferry.server.security.tls import TlsFiles
from tensorferry.server.status import StatusCode
from tensorferry.server.system.threads import HandlerThreads, ThreadKind, new_thread
from tensorferry.server.transport.call_admission import CallAdmission, Refusal
from tensorferry.server.transport.http.answers import error_response, status_response
from tensorferry.server.transport.http.bodies import unpacked
from tensorferry.server.transport.http.connection import Connection, Exchange
from tensorferry.server.transport.http.errors import HttpError
from tensorferry.server.transport.http.heads import Head, HeadCache
from tensorferry.server.transport.http.infer_answers import AnswerTranslator
from tensorferry.server.transport.http.infer_requests import RequestTranslator
from tensorferry.server.transport.http.routes import Route, fields_of, path_of, target_of
from tensorferry.server.transport.inline_schedule import InlineSchedule
from tensorferry.server.transport.threaded_servicer import Extension
from tensorferry.server.transport.transport_state import TransportState
from tensorferry.server.wire import bounds
from tensorferry.server.wire.receiving import receive

_log = logging.getLogger("tensorferry.server")

# JSON of more bytes is read and written on other threads, because it takes milliseconds: a float takes about 100 ns.
_LONG_JSON_BYTES = 64 << 10
_LONG_ANSWER_BYTES = 16 << 10
# More than one, so that one long body does not delay all others.
_JSON_THREADS = 2
# Threads for the other methods, of which loading a model takes long.
_METHOD_THREADS = 16
_SWEEP_SECONDS = 1.0
_BACKLOG = 1024
_HANDSHAKE_SECONDS = 10.0


class HttpServer:
    """Serves the protocol over HTTP/1.1 on a listening socket, which it owns. Call `start`, `begin_drain` and `close` once each.

    `extensions` implement all methods but inference, `shared` is that of all transports. `grpc_address` returns where gRPC is
    served, for clients that take this port for it. At most `max_connections` are open; 0 is no limit.
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
        self._access = shared.access
        self._grpc_address = grpc_address
        self._tls = shared.tls
        self.unread = shared.unread
        self.max_body_bytes = service.limits.message_bytes
        self._admission: CallAdmission[Connection] = CallAdmission(
            service,
            access=shared.access,
            unread=shared.unread,
            calls=shared.calls,
            peer_of=lambda connection: connection.peer,
            certificate_of=lambda connection: connection.certificate,
        )
        self._handlers: dict[str, Callable[[Any], Any]] = {}
        for extension in extensions:
            self._handlers.update(extension.methods())
        self._requests = RequestTranslator(self._metadata_of)
        self._answers = AnswerTranslator()
        self._json_threads: Executor = HandlerThreads(_JSON_THREADS, "http-json")
        self._method_threads: Executor = HandlerThreads(_METHOD_THREADS, "http-method")
        self._max_connections = max_connections or math.inf
        self.draining = False
        # Replies of other threads, and whether the loop was woken for them.
        self._replies: deque[tuple[Exchange, InferenceReply]] = deque()
        self._woken = False
        # All fields below belong to the loop's thread.
        self._loop = asyncio.new_event_loop()
        self._thread_id = 0
        self._heads = HeadCache()
        self._connections: set[Connection] = set()
        self._inline = InlineSchedule()
        self._runs_soon = False
        self._timer: asyncio.TimerHandle | None = None
        self._accepting: asyncio.Server | None = None
        self._started = threading.Event()
        self._thread = new_thread("http", self._run, ThreadKind.ESSENTIAL)

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
        self._thread_id = threading.get_ident()
        loop = self._loop
        loop.set_exception_handler(_log_unexpected)
        context = None if self._tls is None else _CurrentContext(self._tls)
        handshake = None if context is None else _HANDSHAKE_SECONDS
        self._accepting = loop.run_until_complete(
            loop.create_server(
                lambda: Connection(self),
                sock=self._listening,
                ssl=context,
                backlog=_BACKLOG,
                ssl_handshake_timeout=handshake,
            )
        )
        loop.call_later(_SWEEP_SECONDS, self._sweep)
        self._started.set()
        loop.run_forever()
        for connection in list(self._connections):
            connection.abort()
        # Runs the callbacks of the connections that end.
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()

    def _sweep(self) -> None:
        now = time.monotonic()
        for connection in list(self._connections):
            connection.sweep(now)
        self._loop.call_later(_SWEEP_SECONDS, self._sweep)

    # What a connection needs.

    @property
    def grpc_address(self) -> str:
        """Where gRPC is served."""
        return self._grpc_address()

    def head_of(self, block: bytes) -> Head:
        """Return a parsed head with its target. HttpError if it is malformed, or no path of the protocol."""
        head = self._heads.get(block)
        if head.target is None:
            try:
                head.target = target_of(head.method, head.path)
            except HttpError as error:
                head.target = error
        return head

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

    def serve(self, exchange: Exchange, body: bytes) -> None:
        """Answer a request, at once or later."""
        target = exchange.head.target
        try:
            if isinstance(target, HttpError):
                raise target
            assert target is not None
            if target.infer is not None:
                self._infer(exchange, target.infer, body)
            else:
                self._call(exchange, target.route, target.parts, body)
        except Exception as error:
            exchange.respond(self._error(error))

    def _error(self, error: BaseException, reply: InferenceReply | None = None) -> bytes:
        if isinstance(error, HttpError):
            return error_response(error)
        return status_response(self._service.status_of(error, reply))

    # Inference.

    def _infer(self, exchange: Exchange, model: tuple[str, str], body: bytes) -> None:
        head = exchange.head
        admitted, deadline = self._admission.admit_unary(exchange.connection, head.fields, head.timeout)
        if isinstance(admitted, Refusal):
            exchange.respond(status_response(admitted.status))
            return
        long = len(body) if head.json_length is None else head.json_length
        if head.encoding != "identity" or long > _LONG_JSON_BYTES:
            work = partial(self._submit, exchange, model, body, deadline, admitted, None)
            _on_thread(self._json_threads, work)
        else:
            self._submit(exchange, model, body, deadline, admitted, self._run_soon)

    def _submit(
        self,
        exchange: Exchange,
        model: tuple[str, str],
        body: bytes,
        deadline: float,
        caller: ClientIdentity,
        run_soon: Callable[[InlineRunner], None] | None,
    ) -> None:
        """Submit an admitted request. Without `run_soon`, on any thread."""
        head = exchange.head
        try:
            if head.encoding != "identity":
                body = unpacked(body, head.encoding, self.max_body_bytes)
            message, exchange.form = self._requests.message(model, body, head.json_length)
        except Exception as error:
            self._admission.calls.end_unary()
            if isinstance(error, HttpError):
                self._service.count_refused(StatusCode.INVALID_ARGUMENT)
            data = self._error(error)
            self.on_loop(partial(exchange.respond, data)) if run_soon is None else exchange.respond(data)
            return
        call = self._service.submit(
            message, deadline, partial(self._completed, exchange), head.fields, caller, run_soon=run_soon
        )
        exchange.submitted(call)

    def _completed(self, exchange: Exchange, reply: InferenceReply) -> None:
        """Send a reply now, or wake the loop for it. Called on any thread."""
        if threading.get_ident() == self._thread_id:
            self._answer(exchange, reply)
            return
        self._replies.append((exchange, reply))
        if not self._woken:
            self._woken = True
            self.on_loop(self._answer_all)

    def _answer_all(self) -> None:
        # Before the replies are taken, so that one that comes meanwhile wakes the loop again.
        self._woken = False
        while self._replies:
            self._answer(*self._replies.popleft())

    def _answer(self, exchange: Exchange, reply: InferenceReply) -> None:
        self._admission.calls.end_unary()
        form = exchange.form
        if reply.output_bytes > _LONG_ANSWER_BYTES and (form.named or not form.all_binary):
            _on_thread(self._json_threads, partial(self._build_on_thread, exchange, reply))
        else:
            self._send(exchange, reply, self._built(exchange, reply))

    def _build_on_thread(self, exchange: Exchange, reply: InferenceReply) -> None:
        data = self._built(exchange, reply)
        self.on_loop(partial(self._send, exchange, reply, data))

    def _built(self, exchange: Exchange, reply: InferenceReply) -> bytes:
        try:
            return self._answers.response(reply.pieces(), exchange.form, gzipped=exchange.head.accepts_gzip)
        except Exception as error:
            return self._error(error, reply)

    def _send(self, exchange: Exchange, reply: InferenceReply, data: bytes) -> None:
        exchange.respond(data)
        if reply.trace is not None:
            reply.trace.sent()

    def _run_soon(self, batcher: InlineRunner) -> None:
        """Run the batcher's next batch once everything that was received is handled."""
        self._inline.run_soon(batcher)
        if not self._runs_soon:
            self._runs_soon = True
            self._loop.call_soon(self._run_due)

    def _run_due(self) -> None:
        self._runs_soon = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        delay = self._inline.run_due()
        if delay < math.inf:
            self._timer = self._loop.call_later(delay, self._run_due)

    # The other methods.

    def _metadata_of(self, name: str, version: str) -> pb.ModelMetadataResponse:
        metadata: pb.ModelMetadataResponse = self._handlers["ModelMetadata"](
            pb.ModelMetadataRequest(name=name, version=version)
        )
        return metadata

    def _call(self, exchange: Exchange, route: Route, parts: Mapping[str, str], body: bytes) -> None:
        method, head, client = path_of(route), exchange.head, CURRENT_CLIENT.get()
        if method in HEALTH:
            exchange.respond(self._result(route, parts, body, head))
            return
        if self._access is not None:
            role = required_role(method)
            connection = exchange.connection
            client = self._access.admit(
                role, head.fields, lambda: connection.peer, lambda: connection.certificate
            )
            if role == CONTROL:
                _log.info("%s is called by %s", route.rpc, client.name)

        def work() -> None:
            token = CURRENT_CLIENT.set(client)
            try:
                data = self._result(route, parts, body, head)
            except Exception as error:
                data = self._error(error)
            finally:
                CURRENT_CLIENT.reset(token)
            self.on_loop(partial(exchange.respond, data))

        _on_thread(self._method_threads, work)

    def _result(self, route: Route, parts: Mapping[str, str], body: bytes, head: Head) -> bytes:
        """Return the response of a method. Raises what the method raises, and HttpError."""
        if head.encoding != "identity":
            body = unpacked(body, head.encoding, self.max_body_bytes)
        message = route.request(parts, fields_of(body) if head.method == "POST" else {})
        uploads = route.rpc == "RepositoryModelLoad"
        most = self.max_body_bytes if uploads else bounds.MAX_MESSAGE_BYTES
        # As over gRPC: within the bounds of its names and lists.
        message = receive(message.SerializeToString(), type(message), most)
        if route.before:
            self._metadata_of(parts["model"], parts["version"])
        return route.answer(self._handler(route.rpc)(message), parts)

    def _handler(self, rpc: str) -> Callable[[Any], Any]:
        handler = self._handlers.get(rpc)
        if handler is None:
            raise HttpError(501, f"{rpc} is not implemented by this server")
        return handler

    # The end.

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
        """Close every connection once its inferences are answered, or at `deadline`, and end the thread. Idempotent."""
        self._admission.calls.wait_until_none(max(0.0, deadline - time.monotonic()))
        self.on_loop(self._loop.stop)
        if self._thread.ident is not None:
            self._thread.join()
        self._listening.close()
        self._json_threads.shutdown(wait=False)
        self._method_threads.shutdown(wait=False)


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


def _on_thread(threads: Executor, work: Callable[[], None]) -> None:
    try:
        threads.submit(work)
    except RuntimeError:
        # They are shut down.
        work()


def _log_unexpected(loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
    """Log what a callback of the loop raised. A connection that breaks is none of the server's business."""
    error = context.get("exception")
    if isinstance(error, (OSError, ssl.SSLError)):
        _log.debug("http: a connection failed: %r", error)
    else:
        _log.error("unexpected error in the HTTP server (bug): %s", context.get("message"), exc_info=error)
