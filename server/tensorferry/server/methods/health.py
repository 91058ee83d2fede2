"""grpc.health.v1: the health that probes, load balancers and clients' channels ask for.

grpcio-health-checking's servicer cannot be used. It sends while it holds its lock, and when a call of Watch ends, the
thread that polls for the whole server waits for that lock: a watcher that does not read stops the server. Its generated code
also refuses the older protobuf that other packages, such as tritonclient, need.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import grpc

from tensorferry.protos.standard import health_pb2
from tensorferry.server.names import HEALTH_SERVICE
from tensorferry.server.observability.logs.logs import quote
from tensorferry.server.status import status_of
from tensorferry.server.system.threads import HandlerThreads
from tensorferry.server.wire.receiving import receive

_log = logging.getLogger("tensorferry.server")


# Threads for calls: for those whose message is awaited, and those being answered.
_CALL_THREADS = 64

# Threads that send to watchers. Sending to one that reads takes about 100 microseconds.
_SENDER_THREADS = 16
# A watcher that blocks its thread for longer is ended if others wait for a thread.
_STUCK_SECONDS = 1.0
# Each watcher takes about 20 KB. A client has one on each connection.
_MAX_WATCHERS = 10_000
_MAX_WATCHERS_PER_CONNECTION = 100
# Changes kept for a slow watcher. Older ones are dropped.
_MAX_UNSENT = 16

_Status = health_pb2.HealthCheckResponse.ServingStatus
_Send = Callable[[health_pb2.HealthCheckResponse], object]


class HealthService:
    """The status of every service. Thread-safe. Call `close` after the calls have ended; it ends the threads."""

    def __init__(self) -> None:
        # Guards the fields up to _final, and the watchers' fields. Nothing is sent or called while it is held.
        self._lock = threading.Lock()
        self._statuses: dict[str, _Status] = {}
        self._watchers: dict[str, set[_Watcher]] = {}
        self._watcher_count = 0
        self._watchers_by_connection: Counter[str] = Counter()
        # When sending to a watcher began, the oldest first.
        self._sending_since: dict[_Watcher, float] = {}
        self._final = False
        self._sender_threads = HandlerThreads(_SENDER_THREADS, "health")
        # Not the threads of the other methods, because clients can occupy all of those. An orchestrator would then
        # restart a healthy server.
        self._call_threads = HandlerThreads(_CALL_THREADS, "health-call")

    @property
    def threads(self) -> int:
        """The number of its threads."""
        return self._sender_threads.count + self._call_threads.count

    def set(self, service: str, *, serving: bool) -> None:
        """Set a service's status. No effect after `enter_graceful_shutdown`."""
        status = health_pb2.HealthCheckResponse
        notified: list[_Watcher] = []
        with self._lock:
            if not self._final:
                notified = self._change_locked(service, status.SERVING if serving else status.NOT_SERVING)
        self._send_to(notified)

    def enter_graceful_shutdown(self) -> None:
        """Set every service to NOT_SERVING for good."""
        notified: list[_Watcher] = []
        with self._lock:
            self._final = True
            for service in self._statuses:
                notified += self._change_locked(service, health_pb2.HealthCheckResponse.NOT_SERVING)
        self._send_to(notified)

    def close(self) -> None:
        """Stop sending. Idempotent."""
        self._sender_threads.shutdown(wait=False, cancel_futures=True)
        self._call_threads.shutdown(wait=False)

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handler of all methods, for a grpc server."""
        response = health_pb2.HealthCheckResponse.SerializeToString
        return grpc.method_handlers_generic_handler(
            HEALTH_SERVICE,
            {
                "Check": grpc.unary_unary_rpc_method_handler(
                    _run_on(self._call_threads, self.check, health_pb2.HealthCheckRequest),
                    response_serializer=response,
                ),
                "List": grpc.unary_unary_rpc_method_handler(
                    _run_on(self._call_threads, self.list_all, health_pb2.HealthListRequest),
                    response_serializer=health_pb2.HealthListResponse.SerializeToString,
                ),
                "Watch": grpc.unary_stream_rpc_method_handler(
                    _run_on(self._call_threads, self.watch, health_pb2.HealthCheckRequest),
                    response_serializer=response,
                ),
            },
        )

    def check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        """Return a service's status; NOT_FOUND if it has none."""
        with self._lock:
            status = self._statuses.get(request.service)
        if status is None:
            context.abort(
                grpc.StatusCode.NOT_FOUND,
                f"{quote(request.service)} has no health status; a model has one once the server knows it, '' is the "
                "server",
            )
        return health_pb2.HealthCheckResponse(status=status)

    def list_all(
        self, request: health_pb2.HealthListRequest, context: grpc.ServicerContext
    ) -> health_pb2.HealthListResponse:
        """Return the status of every service."""
        with self._lock:
            statuses = dict(self._statuses)
        return health_pb2.HealthListResponse(
            statuses={
                service: health_pb2.HealthCheckResponse(status=status) for service, status in statuses.items()
            }
        )

    def watch(
        self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext, send: _Send
    ) -> None:
        """Send a service's status now and at each change until the call ends. No thread waits between changes."""
        watcher = _Watcher(request.service, context.peer(), context.cancel, send)
        with self._lock:
            refusal = self._refusal_locked(watcher)
            if not refusal:
                self._watcher_count += 1
                self._watchers_by_connection[watcher.connection] += 1
                self._watchers.setdefault(watcher.service, set()).add(watcher)
                unknown = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
                watcher.notify(self._statuses.get(watcher.service, unknown))
        if refusal:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, refusal)
        # add_callback returns False if the call has ended.
        if context.add_callback(lambda: self._remove(watcher)):
            self._send_to([watcher])
        else:
            self._remove(watcher)

    # With this attribute grpcio passes `send` and keeps the call open after the return.
    watch.experimental_non_blocking = True  # type: ignore[attr-defined]

    def _change_locked(self, service: str, status: _Status) -> list[_Watcher]:
        """Set a status and return the watchers for which a thread must be found."""
        if self._statuses.get(service) == status:
            return []
        self._statuses[service] = status
        return [watcher for watcher in self._watchers.get(service, ()) if watcher.notify(status)]

    def _refusal_locked(self, watcher: _Watcher) -> str:
        """Return why a watcher is refused; "" if it is not."""
        if self._watcher_count >= _MAX_WATCHERS:
            return f"{_MAX_WATCHERS} calls of Watch are open, which is the most this server keeps: call Check instead"
        if self._watchers_by_connection[watcher.connection] >= _MAX_WATCHERS_PER_CONNECTION:
            return (
                f"{_MAX_WATCHERS_PER_CONNECTION} calls of Watch are open on this connection, which is the most this server "
                "keeps: end one, or call Check instead"
            )
        return ""

    def _remove(self, watcher: _Watcher) -> None:
        """Remove a watcher whose call has ended. Runs on the polling thread, so it must not wait."""
        with self._lock:
            watcher.discard_unsent()
            self._watcher_count -= 1
            self._watchers_by_connection[watcher.connection] -= 1
            if not self._watchers_by_connection[watcher.connection]:
                del self._watchers_by_connection[watcher.connection]
            watchers = self._watchers.get(watcher.service, set())
            watchers.discard(watcher)
            if not watchers:
                self._watchers.pop(watcher.service, None)

    def _send_to(self, watchers: list[_Watcher]) -> None:
        """Have threads send to these watchers, and end the oldest one that blocks its thread if all are busy."""
        for watcher in watchers:
            try:
                self._sender_threads.submit(self._send_unsent, watcher)
            except RuntimeError:
                # Closed, or the interpreter is shutting down.
                return
        stuck = None
        with self._lock:
            if watchers and len(self._sending_since) >= _SENDER_THREADS:
                oldest, since = next(iter(self._sending_since.items()))
                if time.monotonic() - since > _STUCK_SECONDS:
                    stuck = oldest
        if stuck is not None:
            stuck.end()

    def _send_unsent(self, watcher: _Watcher) -> None:
        """Send a watcher its unsent statuses, on a thread of the pool."""
        with self._lock:
            self._sending_since[watcher] = time.monotonic()
        try:
            while True:
                with self._lock:
                    status = watcher.take_unsent()
                if status is None:
                    return
                watcher.send(health_pb2.HealthCheckResponse(status=status))
        except Exception:
            _log.exception("health: sending to a watcher failed (bug); its call is ended")
            watcher.end()
        finally:
            with self._lock:
                self._sending_since.pop(watcher, None)


def _run_on(threads: HandlerThreads, behaviour: Callable[..., Any], kind: type[Any]) -> Callable[..., Any]:
    """Return the behaviour for grpcio, which runs it on these threads with the message's bytes."""

    # Copies the attributes that grpcio reads.
    @functools.wraps(behaviour)
    def called(data: bytes, context: grpc.ServicerContext, *more: Any) -> Any:
        try:
            request = receive(data, kind)
        except Exception as error:
            status = status_of(error)
            context.abort(status.code, status.message)
        return behaviour(request, context, *more)

    called.experimental_thread_pool = threads  # type: ignore[attr-defined]
    return called


class _Watcher:
    """A call of Watch. The lock of `HealthService` guards the methods, but for `send` and `end`.

    `send` blocks until the message is written or the call has ended. `connection` is grpc's name of its connection.
    """

    __slots__ = ("_has_sender", "_unsent", "connection", "end", "send", "service")

    def __init__(self, service: str, connection: str, end: Callable[[], object], send: _Send) -> None:
        self.service = service
        self.connection = connection
        self.end = end
        self.send = send
        self._unsent: deque[_Status] = deque(maxlen=_MAX_UNSENT)
        # Whether a thread is sending, or about to send, what is unsent.
        self._has_sender = False

    def notify(self, status: _Status) -> bool:
        """Add a status to send. Return whether a thread must be found for it."""
        self._unsent.append(status)
        needs_sender = not self._has_sender
        self._has_sender = True
        return needs_sender

    def take_unsent(self) -> _Status | None:
        """Remove and return the next status to send; None if there is none, and the sender stops."""
        if self._unsent:
            return self._unsent.popleft()
        self._has_sender = False
        return None

    def discard_unsent(self) -> None:
        """Drop what is unsent."""
        self._unsent.clear()
