"""The gRPC server of a process: both transports, the other methods, health, reflection, TLS and access."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from tensorferry.protos import POOL, SERVICE_NAME
from tensorferry.server.config.server_config import PYTHON_SUFFIX, ServerConfig
from tensorferry.server.errors import StartError
from tensorferry.server.inference.service import InferenceService
from tensorferry.server.methods.health import HealthService
from tensorferry.server.methods.reflection import ReflectionService
from tensorferry.server.names import HEALTH_SERVICE, REFLECTION_SERVICES
from tensorferry.server.security.interceptor import AccessInterceptor
from tensorferry.server.system.addresses import address_of, cannot_listen
from tensorferry.server.system.threads import HandlerThreads, essential_threads
from tensorferry.server.transport.channel_args import core_options
from tensorferry.server.transport.core_sockets import close_connections, close_port
from tensorferry.server.transport.grpc_environment import read_in_batches
from tensorferry.server.transport.lane.batched_sends import ResponseBatcher
from tensorferry.server.transport.threaded_servicer import Extension, ThreadedServicer
from tensorferry.server.transport.transport_state import TransportState

if TYPE_CHECKING:
    from tensorferry.server.transport.lane.lane import Lane

_log = logging.getLogger("tensorferry.server")

# A call of the threaded servicer occupies a thread, and a stream occupies two. Threads are started on demand.
MAX_HANDLER_THREADS = 512
_MAX_THREADED_STREAMS = MAX_HANDLER_THREADS // 2
# An open stream of the lane costs a few kilobytes.
_MAX_LANE_STREAMS = 10_000

# More than one, so that one large message does not delay all others.
_UNPACK_THREADS = 2


@dataclass(frozen=True, slots=True)
class Listener:
    """Where a process listens. With `reuse_port`, other processes of this server listen on the same address.

    `private` is a Unix socket on which the process calls itself, for its heartbeat; "" for none.
    """

    host: str
    port: int
    reuse_port: bool = False
    private: str = ""


class GrpcServer:
    """Serves the protocol on one address. Call `start`, `begin_drain` and `close` once each, in this order.

    `extensions` implement all methods but ModelInfer and ModelStreamInfer, which the transports serve by `service`.
    `response_batcher` must be the one that the service's batches are answered through. `shared` is that of all transports.
    """

    def __init__(
        self,
        config: ServerConfig,
        service: InferenceService,
        extensions: Sequence[Extension],
        response_batcher: ResponseBatcher,
        shared: TransportState,
        *,
        listener: Listener | None = None,
    ) -> None:
        self._config = config
        self._service = service
        self._response_batcher = response_batcher
        self._listener = listener or Listener(config.host, config.port)
        self.port = 0
        self._shared = shared
        self._servicer = ThreadedServicer(
            service,
            shared,
            max_streams=config.max_streams or _MAX_THREADED_STREAMS,
            max_in_flight=config.max_in_flight_per_stream,
            extensions=extensions,
        )
        self._health = HealthService()
        self._unpackers = HandlerThreads(_UNPACK_THREADS, "unpack")
        self._max_threads = max(MAX_HANDLER_THREADS, 2 * (config.max_streams or 0))
        self._threads = HandlerThreads(self._max_threads)
        self._server = self._build()
        self._health.set("", serving=False)
        # Liveness: serving as long as the process responds, like ServerLive.
        self._health.set(HEALTH_SERVICE, serving=True)
        for source in config.models:
            if source.path.suffix == PYTHON_SUFFIX:
                # Its models are known when it is imported.
                continue
            self._health.set(source.name, serving=False)
        self._lane: Lane | None = None

    def _build(self) -> grpc.Server:
        config = self._config
        interceptors: list[grpc.ServerInterceptor] = []
        if self._shared.access is not None:
            interceptors.append(AccessInterceptor(self._shared.access))
        server = grpc.server(
            self._threads,
            interceptors=interceptors,
            # All methods that grpcio serves, waiting calls included. Above the limit of ModelInfer, so that the transport
            # refuses such calls first, with a hint when to retry.
            maximum_concurrent_rpcs=config.max_calls + self._max_threads,
            options=core_options(config, reuse_port=self._listener.reuse_port),
        )
        server.add_generic_rpc_handlers((self._servicer.handler(), self._health.handler()))
        if config.reflection:
            services = (SERVICE_NAME, HEALTH_SERVICE, *REFLECTION_SERVICES)
            server.add_generic_rpc_handlers(ReflectionService(services, POOL).handlers())
        return server

    @property
    def transport(self) -> str:
        """The transport of ModelInfer and ModelStreamInfer: lane or threaded."""
        return "threaded" if self._lane is None else "lane"

    @property
    def address(self) -> str:
        """The address on which the server listens, as host:port."""
        return address_of(self._listener.host, self.port)

    @property
    def open_streams(self) -> int:
        """The number of open streams of both transports."""
        lane_streams = self._lane.streams.open_streams if self._lane is not None else 0
        return lane_streams + self._servicer.streams.open_streams

    @property
    def call_threads(self) -> int:
        """The number of threads that serve calls."""
        return self._threads.count + self._health.threads

    def start(self, before_start: Callable[[], None] = lambda: None) -> None:
        """Listen and serve; StartError if the address is in use, or the lane or a file is unusable.

        `before_start` is called once the address is taken, before calls are accepted.
        """
        self._lane = self._attach_lane()
        self.port = self._listener.port
        try:
            if self._shared.tls is None:
                self.port = self._server.add_insecure_port(self.address)
            else:
                credentials = self._shared.tls.credentials()
                self.port = self._server.add_secure_port(self.address, credentials)
        except RuntimeError as error:
            raise cannot_listen(self.address, error) from None
        if self._listener.private:
            self._server.add_insecure_port(f"unix:{self._listener.private}")
        before_start()
        # grpcio's polling thread.
        with essential_threads():
            self._server.start()
        read_in_batches()
        if self._lane is not None:
            self._response_batcher.serve(self.port)
            self._lane.start()

    def _attach_lane(self) -> Lane | None:
        if self._config.transport == "threaded":
            return None
        try:
            # Imported here, because the import fails if grpcio lacks an internal name that the lane uses.
            from tensorferry.server.transport.lane.lane import Lane
            from tensorferry.server.transport.lane.selftest import run_selftest

            run_selftest()
            return Lane(
                self._server,
                self._service,
                self._shared,
                max_streams=self._config.max_streams or _MAX_LANE_STREAMS,
                max_in_flight=self._config.max_in_flight_per_stream,
                response_batcher=self._response_batcher,
                unpackers=self._unpackers,
            )
        except Exception as error:
            reason = f"the lane does not work with grpcio {grpc.__version__}: {error!r}"
            if self._config.transport == "lane":
                raise StartError(f"--transport is lane, but {reason}; use auto or threaded") from error
            _log.warning("%s; requests go through the threaded servicer, which is slower", reason)
            return None

    def publish_health(self, serving: Mapping[str, bool], *, server: bool) -> None:
        """Set the health of models, and of the server as a whole."""
        for name, serves in serving.items():
            self._health.set(name, serving=serves)
        for name in ("", SERVICE_NAME):
            self._health.set(name, serving=server)

    def announce_shutdown(self) -> None:
        """Report NOT_SERVING and close the port. Calls on open connections are still served."""
        self._health.enter_graceful_shutdown()
        if self.port:
            close_port(self.port)

    def begin_drain(self) -> None:
        """End open streams with UNAVAILABLE once every request that was read is answered."""
        self._servicer.streams.begin_drain()
        if self._lane is not None:
            self._lane.streams.begin_drain()

    def report_not_serving(self) -> None:
        """Report NOT_SERVING from now on."""
        self._health.enter_graceful_shutdown()

    def wait_until_sent(self, deadline: float) -> None:
        """Wait until all responses are sent, at most until `deadline`, a time of `time.monotonic`."""
        self._shared.calls.wait_until_none(max(0.0, deadline - time.monotonic()))

    def close(self, deadline: float) -> None:
        """Close the port and all connections, and end every call that is not over at `deadline`."""
        if self.port and close_port(self.port):
            # Calls on open connections are being rejected at this moment. Wait for them, because a proxy reports a broken
            # call if the connection closes during a response.
            self.wait_until_sent(deadline)
            # Closed before the stop, because gRPC's core ends calls that arrive during its stop with CANCELLED. A client
            # whose connection is closed gets UNAVAILABLE.
            close_connections(self.port)
        self._server.stop(None).wait()
        self._threads.shutdown(wait=False)
        self._unpackers.shutdown(wait=False)
        self._health.close()
