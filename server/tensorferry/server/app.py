"""The server: construction of its objects, start, drain and stop."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import TYPE_CHECKING

import grpc

from tensorferry.protos import POOL, SERVICE_NAME
from tensorferry.server.config.checks import changed_cuda_options
from tensorferry.server.config.limits import request_limits
from tensorferry.server.config.server_config import ModelSource, ServerConfig
from tensorferry.server.errors import StartError
from tensorferry.server.inference.service import InferenceService
from tensorferry.server.methods.core import CoreMethods
from tensorferry.server.methods.health import HealthService
from tensorferry.server.methods.log_settings import LogSettingsMethods
from tensorferry.server.methods.model_config import ModelConfigMethods
from tensorferry.server.methods.reflection import ReflectionService
from tensorferry.server.methods.repository import RepositoryMethods
from tensorferry.server.methods.shared_memory import SharedMemoryMethods
from tensorferry.server.methods.statistics import StatisticsMethods
from tensorferry.server.methods.trace_settings import TraceSettingsMethods
from tensorferry.server.models.loader import load_model
from tensorferry.server.models.registry import Model, ModelRegistry
from tensorferry.server.models.repository import Repository
from tensorferry.server.models.repository_control import RepositoryController
from tensorferry.server.monitoring.gpu_metrics import GpuReader, open_nvml
from tensorferry.server.monitoring.metrics import ServerStatistics
from tensorferry.server.names import HEALTH_SERVICE, REFLECTION_SERVICES
from tensorferry.server.recovery.instance_health import InstanceHealth
from tensorferry.server.recovery.recovering_instance import REBUILD_SECONDS
from tensorferry.server.recovery.watchdog import Watchdog
from tensorferry.server.runtime.devices import choose_device
from tensorferry.server.runtime.scratch_directory import remove_abandoned
from tensorferry.server.security.access_control import access_control_for
from tensorferry.server.security.interceptor import AccessInterceptor
from tensorferry.server.security.tls import TlsFiles
from tensorferry.server.shared_memory.regions import Regions
from tensorferry.server.telemetry.logs import LogOutput
from tensorferry.server.threads import HandlerThreads
from tensorferry.server.tracing.triton import TritonTracing
from tensorferry.server.tracing.triton_file import TraceFile
from tensorferry.server.tracing.wiring import RequestTelemetry
from tensorferry.server.transport.channel_args import core_options
from tensorferry.server.transport.core_leaks import warning_of as leak_warning
from tensorferry.server.transport.core_sockets import close_connections, close_port
from tensorferry.server.transport.lane.batched_sends import ResponseBatcher
from tensorferry.server.transport.threaded_servicer import Extension, ThreadedServicer
from tensorferry.server.transport.unread_responses import UnreadResponses

if TYPE_CHECKING:
    from tensorferry.server.monitoring.http_server import MetricsServer
    from tensorferry.server.transport.lane.lane import Lane

_log = logging.getLogger("tensorferry.server")

# A call of the threaded servicer occupies a thread, and a stream occupies two. Threads are started on demand.
MAX_HANDLER_THREADS = 512
_MAX_THREADED_STREAMS = MAX_HANDLER_THREADS // 2
# An open stream of the lane costs a few kilobytes.
_MAX_LANE_STREAMS = 10_000

# More than one, so that one large message does not delay all others.
_UNPACK_THREADS = 2

# Time to send the last responses, after the last request is complete.
_SEND_SECONDS = 1.0
# Time to write or send the last traces.
_TRACE_FLUSH_SECONDS = 5.0


class App:
    """The server. Call `start`, `load`, `drain` and `stop` once each, in this order.

    `stop` can be called at any time, from any thread, to stop at once. With `log_output`, clients can read the log
    settings, and change them if the configuration allows it. `on_device_loss` is called with the reason, on any thread,
    when no instance of a model works and only a restart can help.
    """

    def __init__(
        self,
        config: ServerConfig,
        log_output: LogOutput | None = None,
        on_device_loss: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self.config = config
        self._on_device_loss = on_device_loss
        self.port = 0
        self.registry = ModelRegistry(may_be_empty=config.model_control == "explicit")
        self._trace_file = TraceFile(config.trace_file) if config.trace_file is not None else None
        self._response_batcher = ResponseBatcher()
        self._telemetry = RequestTelemetry(config, self._response_batcher)
        tracing = self._telemetry.tracing
        self._regions = Regions(allowed=config.allow_shared_memory, max_bytes=config.max_queue_bytes)
        self._service = InferenceService(
            self.registry,
            regions=self._regions,
            tracing=tracing,
            triton_status_codes=config.triton_status_codes,
            limits=request_limits(config),
        )
        # Read now, because reading opens a file, which can fail later if too many files are open.
        self._release = version("tensorferry")
        self._device = "cpu"
        self._access = access_control_for(config)
        self._control = RepositoryController(
            self.registry,
            Repository(config.model_repositories),
            self._load_model,
            self._model_changed,
            mode=config.model_control,
            poll_seconds=config.repository_poll_seconds,
        )
        # Shared by both transports.
        self._unread = UnreadResponses(config.max_unsent_bytes)
        self._servicer = self._build_servicer(log_output, TritonTracing(self._trace_file, tracing))
        self._watchdog = Watchdog(min(config.run_timeout or REBUILD_SECONDS, REBUILD_SECONDS))
        # Held while the registry is read and health is set from it, so that the last update is the newest. Nothing else is
        # done while it is held.
        self._health_lock = threading.Lock()
        self._health = HealthService()
        self._unpackers = HandlerThreads(_UNPACK_THREADS, "unpack")
        self._max_threads = max(MAX_HANDLER_THREADS, 2 * (config.max_streams or 0))
        self._threads = HandlerThreads(self._max_threads)
        self._server = self._build_grpc_server()
        self._health.set("", serving=False)
        # Liveness: serving as long as the process responds, like ServerLive.
        self._health.set(HEALTH_SERVICE, serving=True)
        for source in config.models:
            self._health.set(source.name, serving=False)
        self._stopping = threading.Event()
        self._lane: Lane | None = None
        self._metrics: MetricsServer | None = None
        self._gpus: GpuReader | None = None

    def _build_servicer(
        self, log_output: LogOutput | None, triton_tracing: TritonTracing
    ) -> ThreadedServicer:
        config = self.config
        extensions: list[Extension] = [
            ModelConfigMethods(self.registry),
            StatisticsMethods(self.registry),
            RepositoryMethods(self.registry, self._control),
            SharedMemoryMethods(self._regions),
            TraceSettingsMethods(self.registry, triton_tracing),
        ]
        if log_output is not None:
            extensions.append(LogSettingsMethods(log_output, allowed=config.allow_log_settings))
        self._core_methods = CoreMethods(
            self._service,
            self.registry,
            version=self._release,
            extensions=[name for extension in extensions for name in extension.names],
        )
        return ThreadedServicer(
            self._service,
            max_streams=config.max_streams or _MAX_THREADED_STREAMS,
            max_in_flight=config.max_in_flight_per_stream,
            max_calls=config.max_calls,
            extensions=(self._core_methods, *extensions),
            access=self._access,
            unread=self._unread,
        )

    def _build_grpc_server(self) -> grpc.Server:
        config = self.config
        interceptors: list[grpc.ServerInterceptor] = []
        if self._access is not None:
            interceptors.append(AccessInterceptor(self._access, exempt_health=config.auth_exempt_health))
        server = grpc.server(
            self._threads,
            interceptors=interceptors,
            # All methods that grpcio serves, waiting calls included. Above the limit of ModelInfer, so that the transport
            # refuses such calls first, with a hint when to retry.
            maximum_concurrent_rpcs=config.max_calls + self._max_threads,
            options=core_options(config),
        )
        server.add_generic_rpc_handlers((self._servicer.handler(), self._health.handler()))
        if config.reflection:
            services = (SERVICE_NAME, HEALTH_SERVICE, *REFLECTION_SERVICES)
            server.add_generic_rpc_handlers(ReflectionService(services, POOL).handlers())
        return server

    @property
    def service(self) -> InferenceService:
        """The inference service, for callers with their own transport."""
        return self._service

    @property
    def core_methods(self) -> CoreMethods:
        """The metadata methods, for callers with their own transport."""
        return self._core_methods

    @property
    def transport(self) -> str:
        """The transport of ModelInfer and ModelStreamInfer: lane or threaded."""
        return "threaded" if self._lane is None else "lane"

    @property
    def address(self) -> str:
        """The address on which the server listens, as host:port."""
        host = self.config.host
        return f"[{host}]:{self.port}" if ":" in host and not host.startswith("[") else f"{host}:{self.port}"

    @property
    def metrics_url(self) -> str | None:
        """The URL of the metrics; None if they are not served."""
        return None if self._metrics is None else self._metrics.url

    def start(self) -> None:
        """Listen and serve, not ready yet. StartError if an address is in use, or the lane or a file is unusable."""
        if self._trace_file is not None:
            self._trace_file.start()
        if self._access is not None:
            self._access.open()
        self._telemetry.start()
        if warning := leak_warning(grpc.__version__, os.environ.get("GRPC_EXPERIMENTS", "")):
            _log.warning("%s", warning)
        self._lane = self._attach_lane()
        self.port = self.config.port
        credentials = self._tls_credentials()
        try:
            if credentials is None:
                self.port = self._server.add_insecure_port(self.address)
            else:
                self.port = self._server.add_secure_port(self.address, credentials)
        except RuntimeError as error:
            raise StartError(
                f"cannot listen on {self.address}: the address is in use, or is not an address of this machine ({error}); "
                "choose others by --host and --port (0 picks a free port)"
            ) from None
        if self.config.metrics_port is not None:
            self._metrics = self._serve_metrics(self.config.metrics_port)
        self._server.start()
        if self._lane is not None:
            self._response_batcher.serve(self.port)
            self._lane.start()

    def _tls_credentials(self) -> grpc.ServerCredentials | None:
        config = self.config
        if config.tls_certificate is None or config.tls_key is None:
            return None
        return TlsFiles(config.tls_certificate, config.tls_key, config.tls_client_ca).credentials()

    def _serve_metrics(self, port: int) -> MetricsServer:
        # Imported here, because the import is slow.
        from tensorferry.server.monitoring.http_server import MetricsServer
        from tensorferry.server.monitoring.metrics import Metrics
        from tensorferry.server.monitoring.status_page import routes_of
        from tensorferry.server.monitoring.status_report import StatusReport

        status = StatusReport(
            self.registry, self._service, self.config, lambda: self.address, lambda: self.transport
        )
        page = Metrics(self.registry, self.statistics, lambda: self._gpus).page
        return MetricsServer(self.config.metrics_host, port, page, routes_of(status))

    def statistics(self) -> ServerStatistics:
        """Return the counters of the server as a whole. Thread-safe."""
        lane_streams = self._lane.open_streams if self._lane is not None else 0
        return ServerStatistics(
            release=self._release,
            transport=self.transport,
            ready=self._service.ready,
            open_streams=lane_streams + self._servicer.open_streams,
            call_threads=self._threads.count + self._health.threads,
            unsent_bytes=self._unread.total,
            refused=self._service.refused,
        )

    def _attach_lane(self) -> Lane | None:
        if self.config.transport == "threaded":
            return None
        try:
            # Imported here, because the import fails if grpcio lacks an internal name that the lane uses.
            from tensorferry.server.transport.lane.lane import Lane
            from tensorferry.server.transport.lane.selftest import run_selftest

            run_selftest()
            return Lane(
                self._server,
                self._service,
                max_streams=self.config.max_streams or _MAX_LANE_STREAMS,
                max_in_flight=self.config.max_in_flight_per_stream,
                max_calls=self.config.max_calls,
                response_batcher=self._response_batcher,
                access=self._access,
                unread=self._unread,
                unpackers=self._unpackers,
            )
        except Exception as error:
            reason = f"the lane does not work with grpcio {grpc.__version__}: {error!r}"
            if self.config.transport == "lane":
                raise StartError(f"--transport is lane, but {reason}; use auto or threaded") from error
            _log.warning("%s; requests go through the threaded servicer, which is slower", reason)
            return None

    def load(self) -> None:
        """Load every model; the server is ready afterwards. StartError names the first model that fails."""
        config = self.config
        remove_abandoned()
        self._device = choose_device(config.device)
        if self._device == "cpu":
            for changed in changed_cuda_options(config):
                _log.warning("--%s, which has no effect: no model runs on a GPU", changed)
        elif self._metrics is not None:
            self._gpus = open_nvml()
        names = config.load_models if config.model_control == "explicit" else ("*",)
        self._control.start(config.models, names, strict=config.exit_on_error)
        self.registry.mark_complete()
        self._publish_health()

    def _announce_shutdown(self) -> None:
        """Report NOT_SERVING and close the port, but serve every call, for --drain-delay-seconds."""
        if not self.config.drain_delay:
            return
        self._service.begin_lame_duck()
        self._health.enter_graceful_shutdown()
        close_port(self.port)
        self._stopping.wait(self.config.drain_delay)

    def drain(self) -> bool:
        """Reject new requests, after the delay, and finish the accepted ones; return whether all finished in time."""
        self._announce_shutdown()
        deadline = time.monotonic() + self.config.drain_seconds
        # Health last, so that a client that sees NOT_SERVING is already rejected.
        self._begin_drain()
        self._health.enter_graceful_shutdown()
        drained = self._control.drain(deadline)
        for model in self.registry.models():
            self.registry.mark_unloading(model)
            drained = model.batcher.drain(max(0.0, deadline - time.monotonic())) and drained
        return drained

    def _begin_drain(self) -> None:
        self._service.begin_drain()
        self._servicer.begin_drain()
        if self._lane is not None:
            self._lane.begin_drain()

    def _wait_until_sent(self, deadline: float) -> None:
        """Wait until all responses are sent, at most until `deadline`, a time of `time.monotonic`."""
        self._servicer.wait_until_over(max(0.0, deadline - time.monotonic()))
        if self._lane is not None:
            self._lane.wait_until_over(max(0.0, deadline - time.monotonic()))

    def stop(self, grace: float = _SEND_SECONDS) -> bool:
        """End every call after `grace` seconds, with UNAVAILABLE, and unload every model. Idempotent.

        Return whether every worker has ended: a worker that runs in ONNX Runtime cannot be interrupted.
        """
        self._stopping.set()
        self._begin_drain()
        deadline = time.monotonic() + grace
        self._wait_until_sent(deadline)
        ended = [self._control.close(grace)]
        ended += [model.batcher.close(drain=False, timeout=grace) for model in self.registry.models()]
        if self.port and close_port(self.port):
            # Calls on open connections are being rejected at this moment. Wait for them, because a proxy reports a broken
            # call if the connection closes during a response.
            self._wait_until_sent(deadline)
            # Closed before the stop, because gRPC's core ends calls that arrive during its stop with CANCELLED. A client
            # whose connection is closed gets UNAVAILABLE.
            close_connections(self.port)
        self._server.stop(None).wait()
        self._threads.shutdown(wait=False)
        self._unpackers.shutdown(wait=False)
        self._health.close()
        if self._metrics is not None:
            self._metrics.close()
        gpus, self._gpus = self._gpus, None
        if gpus is not None:
            gpus.close()
        self._watchdog.close()
        self._regions.close()
        if self._trace_file is not None and not self._trace_file.stop(_TRACE_FLUSH_SECONDS):
            _log.warning("the last request traces were not written within %g s", _TRACE_FLUSH_SECONDS)
        self._telemetry.stop(_TRACE_FLUSH_SECONDS)
        return all(ended)

    def _load_model(self, source: ModelSource) -> Model:
        return load_model(
            source,
            self.config,
            self._device,
            self._telemetry.response_hook,
            self._watchdog,
            changed=self._health_changed,
            lost=self._on_device_loss,
        )

    def _health_changed(self, health: InstanceHealth) -> None:
        self.registry.health_changed(health)
        self._model_changed(health.name)

    def _model_changed(self, name: str) -> None:
        self._service.models_changed()
        self._publish_health(name)

    def _publish_health(self, *names: str) -> None:
        with self._health_lock:
            for name in names:
                self._health.set(name, serving=self.registry.serves(name))
            for name in ("", SERVICE_NAME):
                self._health.set(name, serving=self.registry.serving)
