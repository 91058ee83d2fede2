"""The server: construction of its objects, start, drain and stop."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING

import grpc

from tensorferry.server.config.checks import changed_cuda_options
from tensorferry.server.config.limits import RequestLimits
from tensorferry.server.config.model_tables import table_name, unserved_tables
from tensorferry.server.config.server_config import ModelSource, ServerConfig
from tensorferry.server.errors import StartError
from tensorferry.server.grpc_server import GrpcServer, Listener
from tensorferry.server.inference.calls.model_calls import ModelCalls
from tensorferry.server.inference.service import InferenceService
from tensorferry.server.inference.shared_memory.regions import Regions
from tensorferry.server.inference.suspects.crash_watch import CrashWatch, note_running
from tensorferry.server.methods.core import CoreMethods
from tensorferry.server.methods.log_settings import LogSettingsMethods
from tensorferry.server.methods.one_process_only import OneProcessOnly
from tensorferry.server.methods.repository import RepositoryMethods
from tensorferry.server.methods.shared_memory import SharedMemoryMethods
from tensorferry.server.methods.statistics import StatisticsMethods
from tensorferry.server.methods.trace_settings import TraceSettingsMethods
from tensorferry.server.models.lifecycle.idle_work import IdleWork
from tensorferry.server.models.lifecycle.load_context import LoadContext
from tensorferry.server.models.lifecycle.loader import load_model
from tensorferry.server.models.lifecycle.model import Model
from tensorferry.server.models.lifecycle.registry import ModelRegistry, ModelState
from tensorferry.server.models.lifecycle.unloading import wait_until_idle
from tensorferry.server.models.repository.declared_sources import declared_sources, warn_of_unknown_calls
from tensorferry.server.models.repository.embedding_sources import embedding_sources
from tensorferry.server.models.repository.fetched_sources import fetched_sources, open_repository
from tensorferry.server.models.repository.repository_control import RepositoryController
from tensorferry.server.observability.logs.logs import LogOutput
from tensorferry.server.observability.monitoring.processes import ProcessStatus, ServerStatistics
from tensorferry.server.observability.tracing.wiring import RequestTelemetry
from tensorferry.server.processes.peers import Peers
from tensorferry.server.runtime.checks.load_budget import LoadBudget
from tensorferry.server.runtime.checks.trial_runs import loads_still_run
from tensorferry.server.runtime.devices import choose_device
from tensorferry.server.runtime.files.op_libraries import server_libraries
from tensorferry.server.runtime.gpu.gpu_readings import GpuReader, open_nvml
from tensorferry.server.runtime.recovery.instance_health import InstanceHealth
from tensorferry.server.runtime.recovery.watchdog import REBUILD_SECONDS, Watchdog
from tensorferry.server.system.addresses import listen_for_http, listen_for_metrics
from tensorferry.server.system.malloc import UnusedMemory
from tensorferry.server.system.scratch_directory import remove_abandoned
from tensorferry.server.transport.core_leaks import warning_of as leak_warning
from tensorferry.server.transport.lane.batched_sends import ResponseBatcher
from tensorferry.server.transport.threaded_servicer import Extension
from tensorferry.server.transport.transport_state import TransportState

if TYPE_CHECKING:
    from tensorferry.server.observability.monitoring.http_server import MetricsServer
    from tensorferry.server.transport.http.server import HttpServer

_log = logging.getLogger("tensorferry.server")

# Time to send the last responses, after the last request is complete.
_SEND_SECONDS = 1.0
# Time to write or send the last traces.
_TRACE_FLUSH_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class OneOfSeveral:
    """What differs if this process is one of several on one port.

    `peers` are the others. `statuses` returns all, as the supervisor last described them. `sockets` has the listening
    sockets of "metrics" and "http", which all share, as far as these are served.
    """

    listener: Listener
    peers: Peers
    crash_watch: CrashWatch
    statuses: Callable[[], Sequence[ProcessStatus]]
    sockets: Mapping[str, socket.socket]


class App:
    """The server. Call `start`, `load`, `drain` and `stop` once each, in this order.

    `stop` can be called at any time, from any thread, to stop at once. With `log_output`, clients can read the log
    settings, and change them if the configuration allows it. `on_device_loss` is called with the reason, on any thread,
    when no instance of a model works and only a restart can help, unless the model is replaced or unloaded.
    """

    def __init__(
        self,
        config: ServerConfig,
        log_output: LogOutput | None = None,
        on_device_loss: Callable[[str], None] = lambda reason: None,
        several: OneOfSeveral | None = None,
    ) -> None:
        self.config = config
        self._several = several
        self._loading: Callable[[], AbstractContextManager[None]] = (
            nullcontext if several is None else several.crash_watch.page.loading
        )
        self._on_device_loss = on_device_loss
        repository = open_repository(config)
        self.registry = ModelRegistry(may_be_empty=config.model_control == "explicit", roots=repository.roots)
        self._response_batcher = ResponseBatcher()
        self._telemetry = RequestTelemetry(config, self._response_batcher)
        tracing = self._telemetry.tracing
        self._regions = Regions(
            allowed=config.allow_shared_memory, max_bytes=max(config.values("max_queue_bytes"))
        )
        # This and `core_methods` are also for callers with their own transport.
        self.service = InferenceService(
            self.registry,
            regions=self._regions,
            tracing=tracing,
            triton_status_codes=config.triton_status_codes,
            limits=RequestLimits(config.max_request_rows, config.max_string_bytes, config.max_message_bytes),
            crash_watch=None if several is None else several.crash_watch,
        )
        self._calls = ModelCalls(self.registry, tracing, triton_status_codes=config.triton_status_codes)
        # Read now, because reading opens a file, which can fail later if too many files are open.
        self._release = version("tensorferry")
        # The device of each --device, of the server and of single models.
        self._devices: Mapping[str, str] = {}
        self._control = RepositoryController(
            self.registry,
            repository,
            self._load_model,
            self._model_changed,
            mode=config.model_control,
            poll_seconds=config.repository_poll_seconds,
            sequence_seconds=config.drain_seconds,
            loading=self._loading,
        )
        self._idle_work = IdleWork(config, self.registry, self._load, self._control.replace)
        self._extensions = self._build_extensions(log_output)
        self._transports = TransportState(config)
        self._grpc = GrpcServer(
            config,
            self.service,
            self._extensions,
            self._response_batcher,
            self._transports,
            listener=None if several is None else several.listener,
        )
        self._http: HttpServer | None = None
        self._watchdog = Watchdog(
            min(limit or REBUILD_SECONDS for limit in (*config.values("run_timeout"), REBUILD_SECONDS))
        )
        self._unused_memory = UnusedMemory()
        self._watchdog.watch(self._unused_memory)
        if several is not None:
            several.crash_watch.waiting.watch_deadlines(self._watchdog)
        # Held while the registry is read and health is set from it, so that the last update is the newest. Nothing else is
        # done while it is held.
        self._health_lock = threading.Lock()
        self._stopping = threading.Event()
        self._metrics: MetricsServer | None = None
        self._gpus: GpuReader | None = None

    def _build_extensions(self, log_output: LogOutput | None) -> Sequence[Extension]:
        config = self.config
        extensions: list[Extension] = [
            StatisticsMethods(self.registry, None if self._several is None else self._several.peers),
            RepositoryMethods(self.registry, self._control),
            SharedMemoryMethods(self._regions),
            TraceSettingsMethods(self.registry, spans=config.otel),
        ]
        if log_output is not None:
            extensions.append(LogSettingsMethods(log_output, allowed=config.allow_log_settings))
        if self._several is not None:
            # What is switched off says so itself.
            enabled = {
                RepositoryMethods: config.model_control == "explicit",
                SharedMemoryMethods: config.allow_shared_memory,
                LogSettingsMethods: config.allow_log_settings,
            }
            extensions = [
                OneProcessOnly(extension) if enabled.get(type(extension)) else extension
                for extension in extensions
            ]
        self.core_methods = CoreMethods(
            self.service,
            self.registry,
            version=self._release,
            extensions=[name for extension in extensions for name in extension.names],
            processes=config.processes or 1,
        )
        return self.core_methods, *extensions

    @property
    def port(self) -> int:
        """The port on which the server listens; 0 before the start."""
        return self._grpc.port

    @property
    def transport(self) -> str:
        """The transport of ModelInfer and ModelStreamInfer: lane or threaded."""
        return self._grpc.transport

    @property
    def address(self) -> str:
        """The address on which the server listens, as host:port."""
        return self._grpc.address

    @property
    def metrics_url(self) -> str | None:
        """The URL of the metrics; None if they are not served."""
        return None if self._metrics is None else self._metrics.url

    @property
    def http_url(self) -> str | None:
        """The URL of the HTTP port; None if there is none."""
        return None if self._http is None else self._http.url

    def start(self) -> None:
        """Listen and serve, not ready yet. StartError if an address is in use, or the lane or a file is unusable."""
        self._telemetry.start()
        experiments = os.environ.get("GRPC_EXPERIMENTS", "")
        if warning := leak_warning(grpc.__version__, experiments, self.config.max_connection_age):
            _log.warning("%s", warning)
        self._transports.open()
        self._grpc.start(self._serve_others)
        if self._several is not None:
            self._several.peers.start()

    def _serve_others(self) -> None:
        """Serve metrics and HTTP, whose addresses are taken here unless the supervisor has."""
        config, shared = self.config, {} if self._several is None else self._several.sockets
        if config.metrics_port is not None:
            self._serve_metrics(
                shared.get("metrics") or listen_for_metrics(config.metrics_host, config.metrics_port)
            )
        if config.http_port is not None:
            self._serve_http(shared.get("http") or listen_for_http(config.host, config.http_port))

    def _serve_http(self, listening: socket.socket) -> None:
        # Imported here, because few servers need it.
        from tensorferry.server.transport.http.application import InferenceApplication
        from tensorferry.server.transport.http.server import ConnectionLimits, HttpServer

        shared = self._transports
        self._http = HttpServer(
            listening,
            partial(InferenceApplication, self.service, self._extensions, shared, listening),
            unread=shared.unread,
            tls=shared.tls,
            limits=ConnectionLimits(self.config.max_connections),
            grpc_address=lambda: self.address,
        )
        self._http.start()

    def _serve_metrics(self, listening: socket.socket) -> None:
        # Imported here, because the import is slow.
        from tensorferry.server.observability.monitoring.http_server import MetricsServer, PageRenderer
        from tensorferry.server.observability.monitoring.merged import page_of_all, status_of_all
        from tensorferry.server.observability.monitoring.metrics.metrics import Metrics
        from tensorferry.server.observability.monitoring.status_page import routes_of
        from tensorferry.server.observability.monitoring.status_report import StatusReport

        status = StatusReport(self.registry, self.service, self.config, lambda: self.address, self.statistics)
        page: PageRenderer = Metrics(self.registry, self.statistics, lambda: self._gpus).page
        report = status.report
        if self._several is not None:
            page, report = page_of_all(self._several.peers, page), status_of_all(self._several.peers, report)
        self._metrics = MetricsServer(listening, page, routes_of(status, report))

    def statistics(self) -> ServerStatistics:
        """Return the counters of this process as a whole. Thread-safe."""
        return ServerStatistics(
            release=self._release,
            transport=self.transport,
            ready=self.service.ready,
            open_streams=self._grpc.open_streams,
            call_threads=self._grpc.call_threads,
            http_connections=0 if self._http is None else self._http.connections,
            unsent_bytes=self._transports.unread.total,
            refused=self.service.refused,
            processes=() if self._several is None else self._several.statuses(),
        )

    def load(self) -> None:
        """Load every model; the server is ready afterwards. StartError names the first model that fails."""
        config = self.config
        remove_abandoned()
        # Tried now, because models may be loaded later, or not at all.
        for libraries in config.values("custom_ops"):
            server_libraries(libraries)
        self._devices = _choose_devices(config)
        if set(self._devices.values()) == {"cpu"}:
            for changed in changed_cuda_options(config):
                _log.warning("--%s, which has no effect: no model runs on a GPU", changed)
        elif self.config.metrics_port is not None:
            self._gpus = open_nvml()
        names = config.load_models if config.model_control == "explicit" else ("*",)
        given = [*fetched_sources(config.models, config), *embedding_sources(config.embeddings)]
        sources = declared_sources(given)
        self._control.start(sources, names, strict=config.exit_on_error)
        self.registry.mark_complete()
        self._idle_work.start()
        self._publish_health()
        if config.model_control == "none":
            models = self.registry.models()
            served = sorted(
                {model.name for model in models} | {step.name for model in models for step in model.steps}
            )
            for warning in unserved_tables(config, served):
                _log.warning("%s", warning)
            warn_of_unknown_calls(sources, {model.name for model in models})

    def _announce_shutdown(self) -> None:
        """Report NOT_SERVING and close the port of gRPC, but serve every call, for --drain-delay-seconds."""
        if not self.config.drain_delay:
            return
        self.service.begin_lame_duck()
        if self._http is not None:
            self._http.announce_shutdown()
        self._grpc.announce_shutdown()
        self._stopping.wait(self.config.drain_delay)

    def drain(self) -> bool:
        """Reject new requests, after the delay, and finish the accepted ones; return whether all finished in time."""
        self._announce_shutdown()
        deadline = time.monotonic() + self.config.drain_seconds
        # Health last, so that a client that sees NOT_SERVING is already rejected.
        self._begin_drain()
        self._grpc.report_not_serving()
        # Together, because a request of one model may need another: only then are they closed one by one.
        models = [*self.registry.models(), *self._control.outgoing_models()]
        drained = wait_until_idle(models, deadline)
        drained = self._control.drain(deadline) and drained
        for model in self.registry.models():
            self.registry.mark_unloading(model)
            drained = model.batcher.drain(max(0.0, deadline - time.monotonic())) and drained
        return drained

    def _begin_drain(self) -> None:
        self.service.begin_drain()
        self._idle_work.end()
        if self._http is not None:
            self._http.begin_drain()
        self._grpc.begin_drain()

    def stop(self, grace: float = _SEND_SECONDS) -> bool:
        """End every call after `grace` seconds, with UNAVAILABLE, and unload every model. Idempotent.

        Return whether every worker and load has ended: a run in ONNX Runtime cannot always be interrupted.
        """
        self._stopping.set()
        self._begin_drain()
        deadline = time.monotonic() + grace
        self._grpc.wait_until_sent(deadline)
        # All at once, because a function ends only when what it waits for in another model has ended.
        for model in self.registry.models():
            model.batcher.close(drain=False, timeout=0.0)
        ended = [self._idle_work.close(grace), self._control.close(grace)]
        for model in self.registry.models():
            ended.append(model.batcher.close(drain=False, timeout=grace))
            model.release()
        if self._http is not None:
            self._http.close(deadline)
        self._grpc.close(deadline)
        if self._metrics is not None:
            self._metrics.close()
        gpus, self._gpus = self._gpus, None
        if gpus is not None:
            gpus.close()
        self._watchdog.close()
        self._regions.close()
        self._telemetry.stop(_TRACE_FLUSH_SECONDS)
        return all(ended) and not loads_still_run()

    def _load_model(self, source: ModelSource) -> Model:
        model = self._load(source, LoadBudget)
        self._idle_work.add(model)
        return model

    def _load(self, source: ModelSource, new_budget: Callable[[], LoadBudget]) -> Model:
        context = LoadContext(
            self.config,
            self._devices,
            self._telemetry.response_hook,
            self._watchdog,
            on_health_change=self._health_changed,
            on_device_lost=self._device_lost,
            batch_started=None if self._several is None else note_running,
            calls=self._calls.of_batch,
            registry=self.registry,
            new_budget=new_budget,
        )
        with self._loading():
            return load_model(source, context)

    def _health_changed(self, health: InstanceHealth) -> None:
        self.registry.health_changed(health)
        self._model_changed(health.name)

    def _device_lost(self, health: InstanceHealth, reason: str) -> None:
        # A model that was replaced or is being unloaded needs no restart.
        entries = [entry for entry in self.registry.entries() if entry.state is not ModelState.UNLOADING]
        if any(entry.model is not None and entry.model.health is health for entry in entries):
            self._on_device_loss(reason)

    def _model_changed(self, name: str) -> None:
        self._calls.graph.forget(name)
        self.service.models_changed()
        self._publish_health(name, *{user.name for user in self.registry.users(name)})

    def _publish_health(self, *names: str) -> None:
        with self._health_lock:
            serving = {name: self.registry.serves(name) for name in names}
            ready = self.registry.serving
            self._grpc.publish_health(serving, server=ready)


def _choose_devices(config: ServerConfig) -> Mapping[str, str]:
    """Return the device of each --device. StartError names the model's table that asks for a missing device."""
    devices = {config.device: choose_device(config.device)}
    for name in config.model_options:
        wanted = config.for_model(name).device
        try:
            devices[wanted] = devices.get(wanted) or choose_device(wanted)
        except StartError as error:
            raise StartError(f"{table_name(name)}: {error}") from None
    return devices
