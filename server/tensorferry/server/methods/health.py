"""grpc.health.v1: what probes, balancers and the channels of clients are told.

grpcio-health-checking has a servicer too, but it cannot be used here. It sends while it holds its lock, and the
thread that polls for the whole server waits for that lock when a watcher leaves: a watcher that does not read stops
the server. And its generated code refuses the older protobuf that other packages, such as tritonclient, require.
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
from tensorferry.server.status import status_of
from tensorferry.server.telemetry.logs import quote
from tensorferry.server.threads import HandlerThreads
from tensorferry.server.wire.receiving import receive

_log = logging.getLogger("tensorferry.server")


# Calls of which the message is awaited, or that are answered at the same time.
_CALLS = 64

_Status = health_pb2.HealthCheckResponse.ServingStatus
_Send = Callable[[health_pb2.HealthCheckResponse], object]

# Watchers that are told something at the same time; it takes some 100 microseconds for one that reads.
_SENDERS = 16
# One to whom nothing could be sent for so long is ended where others wait to be told.
_STUCK_SECONDS = 1.0
# Each takes some 20 KB; a client has one on each connection.
_MOST_WATCHERS = 10_000
_MOST_OF_A_CONNECTION = 100
# Changes that one who reads slowly has yet to hear of; of more the latest.
_MOST_UNSENT = 16


class HealthService:
    """The status of every service. Thread-safe; `close` ends its threads once the calls have ended."""

    def __init__(self) -> None:
        # Guards every field below, and those of the watchers. Nothing is sent or called while it is held.
        self._lock = threading.Lock()
        self._statuses: dict[str, _Status] = {}
        self._watchers: dict[str, set[_Watcher]] = {}
        # How many watchers there are, in all and by connection.
        self._open = 0
        self._watching: Counter[str] = Counter()
        # Whom something is being sent to, the longest first, and since when.
        self._sending: dict[_Watcher, float] = {}
        self._final = False
        self._threads = HandlerThreads(_SENDERS, "health")
        # Those of the other methods may all be taken, for as long as clients want: whoever starts and ends servers by
        # their health would end one that is well.
        self._calls = HandlerThreads(_CALLS, "health-call")

    @property
    def threads(self) -> int:
        """How many threads it has."""
        return self._threads.count + self._calls.count

    def set(self, service: str, *, serving: bool) -> None:
        """From now on a service has this status; without effect after `enter_graceful_shutdown`."""
        status = health_pb2.HealthCheckResponse
        told: list[_Watcher] = []
        with self._lock:
            if not self._final:
                told = self._change_locked(service, status.SERVING if serving else status.NOT_SERVING)
        self._send_to(told)

    def enter_graceful_shutdown(self) -> None:
        """Every service is NOT_SERVING, and stays so."""
        told: list[_Watcher] = []
        with self._lock:
            self._final = True
            for service in self._statuses:
                told += self._change_locked(service, health_pb2.HealthCheckResponse.NOT_SERVING)
        self._send_to(told)

    def close(self) -> None:
        """Tells nobody anything any more. Idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._calls.shutdown(wait=False)

    def handler(self) -> grpc.GenericRpcHandler:
        """All methods of the service, to be added to a grpc server."""
        response = health_pb2.HealthCheckResponse.SerializeToString
        return grpc.method_handlers_generic_handler(
            HEALTH_SERVICE,
            {
                "Check": grpc.unary_unary_rpc_method_handler(
                    _on_threads(self._calls, self.check, health_pb2.HealthCheckRequest),
                    response_serializer=response,
                ),
                "List": grpc.unary_unary_rpc_method_handler(
                    _on_threads(self._calls, self.list_all, health_pb2.HealthListRequest),
                    response_serializer=health_pb2.HealthListResponse.SerializeToString,
                ),
                "Watch": grpc.unary_stream_rpc_method_handler(
                    _on_threads(self._calls, self.watch, health_pb2.HealthCheckRequest),
                    response_serializer=response,
                ),
            },
        )

    def check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        """The status of a service now; NOT_FOUND for one that has none."""
        with self._lock:
            status = self._statuses.get(request.service)
        if status is None:
            context.abort(
                grpc.StatusCode.NOT_FOUND,
                f"no health is known of {quote(request.service)}; a model has its own once the server knows of it, "
                "'' stands for the server",
            )
        return health_pb2.HealthCheckResponse(status=status)

    def list_all(
        self, request: health_pb2.HealthListRequest, context: grpc.ServicerContext
    ) -> health_pb2.HealthListResponse:
        """The status of every service now."""
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
        """The status of a service now, and each change until the caller leaves; no thread waits meanwhile."""
        watcher = _Watcher(request.service, context.peer(), context.cancel, send)
        with self._lock:
            refusal = self._refusal_locked(watcher)
            if not refusal:
                self._open += 1
                self._watching[watcher.peer] += 1
                self._watchers.setdefault(watcher.service, set()).add(watcher)
                unknown = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
                watcher.tell(self._statuses.get(watcher.service, unknown))
        if refusal:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, refusal)
        # False if the caller has left.
        if context.add_callback(lambda: self._left(watcher)):
            self._send_to([watcher])
        else:
            self._left(watcher)

    # grpcio then gives it `send`, and keeps the call open when it returns.
    watch.experimental_non_blocking = True  # type: ignore[attr-defined]

    def _change_locked(self, service: str, status: _Status) -> list[_Watcher]:
        """The watchers for whom somebody has to be found who tells them."""
        if self._statuses.get(service) == status:
            return []
        self._statuses[service] = status
        return [watcher for watcher in self._watchers.get(service, ()) if watcher.tell(status)]

    def _refusal_locked(self, watcher: _Watcher) -> str:
        """Why it may not watch; "" if it may."""
        if self._open >= _MOST_WATCHERS:
            return f"{_MOST_WATCHERS} calls of Watch are open, which is the most this server keeps: call Check instead"
        if self._watching[watcher.peer] >= _MOST_OF_A_CONNECTION:
            return (
                f"{_MOST_OF_A_CONNECTION} calls of Watch are open on this connection, which is the most this server keeps: end "
                "one, or call Check instead"
            )
        return ""

    def _left(self, watcher: _Watcher) -> None:
        """On the thread that polls: it must not wait."""
        with self._lock:
            watcher.unsent.clear()
            self._open -= 1
            self._watching[watcher.peer] -= 1
            if not self._watching[watcher.peer]:
                del self._watching[watcher.peer]
            watching = self._watchers.get(watcher.service, set())
            watching.discard(watcher)
            if not watching:
                self._watchers.pop(watcher.service, None)

    def _send_to(self, watchers: list[_Watcher]) -> None:
        """Has those that `tell` said so of be told."""
        for watcher in watchers:
            try:
                self._threads.submit(self._sends, watcher)
            except RuntimeError:
                # Closed, or the interpreter ends.
                return
        stuck = None
        with self._lock:
            if watchers and len(self._sending) >= _SENDERS:
                first, since = next(iter(self._sending.items()))
                if time.monotonic() - since > _STUCK_SECONDS:
                    stuck = first
        if stuck is not None:
            stuck.end()

    def _sends(self, watcher: _Watcher) -> None:
        """Sends what a watcher is to be told, on a thread of the pool."""
        with self._lock:
            self._sending[watcher] = time.monotonic()
        try:
            while True:
                with self._lock:
                    if not watcher.unsent:
                        watcher.told = True
                        return
                    status = watcher.unsent.popleft()
                watcher.send(health_pb2.HealthCheckResponse(status=status))
        except Exception:
            _log.exception("a watcher of the health could not be told; this is a bug in tensorferry.server")
            watcher.end()
        finally:
            with self._lock:
                self._sending.pop(watcher, None)


def _on_threads(
    threads: HandlerThreads, behaviour: Callable[..., Any], kind: type[Any]
) -> Callable[..., Any]:
    """The same for grpcio, which calls it with a message's bytes on one of these threads."""

    # With what grpcio is told by attributes of a function.
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
    """A call of Watch. `send` blocks until the message is on its way, or the call has ended."""

    __slots__ = ("end", "peer", "send", "service", "told", "unsent")

    def __init__(self, service: str, peer: str, end: Callable[[], object], send: _Send) -> None:
        self.service = service
        # grpc's name of its connection.
        self.peer = peer
        self.end = end
        self.send = send
        self.unsent: deque[_Status] = deque(maxlen=_MOST_UNSENT)
        # Whether nobody is at work, or about to be, on what is unsent.
        self.told = True

    def tell(self, status: _Status) -> bool:
        """It is to hear of this; whether somebody has to be found who tells it. Under the lock."""
        self.unsent.append(status)
        found, self.told = self.told, False
        return found
