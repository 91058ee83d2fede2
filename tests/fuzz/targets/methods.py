"""Methods beside ModelInfer: an input is the number of a method, and the bytes of its message."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

from fuzz.target import ANSWERED, Context, Counted, FindingError, Refused, Shape, Target, code_of, timed
from fuzz.world import HANDLE, WORDS, World, numbers, output_placed, placed

from tensorferry.protos import SERVICE_NAME
from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.config.server_config import ServerConfig
from tensorferry.server.inference.service import InferenceService
from tensorferry.server.methods.core import CoreMethods
from tensorferry.server.methods.log_settings import LogSettingsMethods
from tensorferry.server.methods.shared_memory import SharedMemoryMethods
from tensorferry.server.methods.statistics import StatisticsMethods
from tensorferry.server.methods.trace_settings import TraceSettingsMethods
from tensorferry.server.observability.logs.logs import LogOutput
from tensorferry.server.observability.tracing.trace import Tracer
from tensorferry.server.transport.threaded_servicer import Extension, ThreadedServicer
from tensorferry.server.transport.transport_state import TransportState


class Method(NamedTuple):
    """A method of the service: `answer` takes bytes and a context, as grpcio calls it."""

    answer: Callable[[bytes, Any], Any]
    serialise: Callable[[Any], bytes] | None
    request: Any
    response: Any


class _Details(NamedTuple):
    method: str
    invocation_metadata: Any = ()


def methods_of(servicer: ThreadedServicer, names: Sequence[str]) -> list[Method]:
    """Return these methods of the servicer, as grpcio finds them."""
    kinds = {m.name: m for m in pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods}
    found = []
    for name in names:
        handler: Any = servicer.handler().service(cast(Any, _Details(f"/{SERVICE_NAME}/{name}")))
        kind = kinds[name]
        request, response = getattr(pb, kind.input_type.name), getattr(pb, kind.output_type.name)
        found.append(Method(handler.unary_unary, handler.response_serializer, request, response))
    return found


class MethodsTarget(Target):
    """Calls methods of the real servicer; subclasses choose them and add checks."""

    name = ""
    words: Sequence[str] = WORDS
    called: ClassVar[Sequence[str]] = ()
    # Messages by method.
    good: ClassVar[Sequence[tuple[str, Any]]] = ()

    def __init__(self, directory: Path) -> None:
        self.world = World(directory)
        self.tracing = Tracer()
        self.service = InferenceService(self.world.registry, regions=self.world.regions, tracing=self.tracing)
        self.counted = Counted()
        servicer = ThreadedServicer(
            self.service,
            TransportState(ServerConfig(models=())),
            max_streams=1,
            max_in_flight=1,
            extensions=(
                CoreMethods(self.service, self.world.registry, version="1"),
                *self.extensions(directory),
            ),
        )
        self._methods = methods_of(servicer, self.called)

    def extensions(self, directory: Path) -> Sequence[Extension]:
        """Return the extensions of the servicer."""
        return ()

    def seeds(self) -> Sequence[bytes]:
        return [
            bytes([self.called.index(name)]) + message.SerializeToString(deterministic=True)
            for name, message in self.good
        ]

    def shape(self, data: bytes) -> Shape:
        front = data[:1] or b"\0"
        return Shape(front, self._methods[front[0] % len(self._methods)].request)

    def run(self, data: bytes) -> str:
        front, _ = self.shape(data)
        method = self._methods[front[0] % len(self._methods)]
        context = Context()
        with timed():
            try:
                answer = method.answer(data[1:], context)
                answer = method.serialise(answer) if method.serialise else answer
                if not isinstance(answer, bytes):
                    raise FindingError(f"an answer of {type(answer).__name__}")
                method.response.FromString(answer)
                return ANSWERED
            except Refused as error:
                return error.code.name
            finally:
                self.afterwards()

    def afterwards(self) -> None:
        """Check what must hold after each input."""

    def check(self) -> None:
        self.world.check()
        self.counted.check()

    def close(self) -> None:
        self.world.close()


class SettingsTarget(MethodsTarget):
    """Health, metadata, configuration, statistics, trace and log settings."""

    name = "settings"
    called = (
        "ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelConfig", "ModelStatistics",
        "TraceSetting", "LogSettings",
    )  # fmt: skip
    words: Sequence[str] = (
        *WORDS, "trace_file", "trace_level", "trace_rate", "trace_count", "log_frequency", "trace_mode", "triton",
        "OFF", "TIMESTAMPS", "TENSORS", "-1", "0", "4294967295", "log_file", "log_info", "log_warning", "log_error",
        "log_verbose_level", "log_format", "default", "ISO8601",
    )  # fmt: skip
    good = (
        ("ServerLive", pb.ServerLiveRequest()),
        ("ServerReady", pb.ServerReadyRequest()),
        ("ModelReady", pb.ModelReadyRequest(name="numbers", version="1")),
        ("ServerMetadata", pb.ServerMetadataRequest()),
        ("ModelMetadata", pb.ModelMetadataRequest(name="alone")),
        ("ModelConfig", pb.ModelConfigRequest(name="strings")),
        ("ModelStatistics", pb.ModelStatisticsRequest(name="numbers")),
        ("ModelStatistics", pb.ModelStatisticsRequest()),
        ("TraceSetting", pb.TraceSettingRequest()),
        (
            "TraceSetting",
            pb.TraceSettingRequest(
                model_name="numbers",
                settings={
                    "trace_level": pb.TraceSettingRequest.SettingValue(value=["TIMESTAMPS"]),
                    "trace_rate": pb.TraceSettingRequest.SettingValue(value=["500"]),
                    "trace_count": pb.TraceSettingRequest.SettingValue(value=["-1"]),
                },
            ),
        ),
        ("TraceSetting", pb.TraceSettingRequest(settings={"trace_level": pb.TraceSettingRequest.SettingValue()})),
        (
            "LogSettings",
            pb.LogSettingsRequest(
                settings={
                    "log_info": pb.LogSettingsRequest.SettingValue(bool_param=True),
                    "log_verbose_level": pb.LogSettingsRequest.SettingValue(uint32_param=0),
                    "log_format": pb.LogSettingsRequest.SettingValue(string_param="ISO8601"),
                }
            ),
        ),
    )  # fmt: skip

    def extensions(self, directory: Path) -> Sequence[Extension]:
        return (
            StatisticsMethods(self.world.registry),
            TraceSettingsMethods(self.world.registry, spans=False),
            LogSettingsMethods(_Output(), allowed=True),
        )


class _Output(LogOutput):
    """Log settings that can be changed without affecting the fuzzer's own log."""

    def __init__(self) -> None:
        level, handlers = logging.getLogger().level, list(logging.getLogger().handlers)
        super().__init__("text", "info")
        logging.getLogger().handlers[:] = handlers
        logging.getLogger().setLevel(level)

    def _apply_locked(self) -> None:
        pass


class MemoryTarget(MethodsTarget):
    """Registers, uses and unregisters shared memory of both kinds."""

    name = "memory"
    called = (
        "SystemSharedMemoryRegister", "SystemSharedMemoryStatus", "SystemSharedMemoryUnregister",
        "CudaSharedMemoryRegister", "CudaSharedMemoryStatus", "CudaSharedMemoryUnregister", "ModelInfer",
    )  # fmt: skip
    good = (
        ("SystemSharedMemoryRegister", pb.SystemSharedMemoryRegisterRequest(name="system", key="/key", byte_size=64)),
        ("SystemSharedMemoryRegister", pb.SystemSharedMemoryRegisterRequest(name="a", key="key", offset=8, byte_size=8)),
        ("SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest(name="system")),
        ("SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest()),
        ("SystemSharedMemoryUnregister", pb.SystemSharedMemoryUnregisterRequest(name="system")),
        ("SystemSharedMemoryUnregister", pb.SystemSharedMemoryUnregisterRequest()),
        ("CudaSharedMemoryRegister", pb.CudaSharedMemoryRegisterRequest(name="device", raw_handle=HANDLE, byte_size=96)),
        ("CudaSharedMemoryStatus", pb.CudaSharedMemoryStatusRequest(name="device")),
        ("CudaSharedMemoryUnregister", pb.CudaSharedMemoryUnregisterRequest(name="device")),
        ("ModelInfer", placed(numbers(2), 0, "system", 0)),
        ("ModelInfer", output_placed(placed(numbers(1), 1, "device", 8), "x_out", "system", 32)),
    )  # fmt: skip

    def __init__(self, directory: Path) -> None:
        # A file for its owner only, where a key that leaves the directory would find it.
        inside = directory / "shm"
        inside.mkdir()
        self._outside = directory / "outside"
        self._outside.write_bytes(b"secret" * 16)
        (inside / "link").symlink_to(self._outside)
        super().__init__(inside)
        self._methods[-1] = Method(self._infer, None, pb.ModelInferRequest, pb.ModelInferResponse)
        self._count = 0

    def extensions(self, directory: Path) -> Sequence[Extension]:
        return (SharedMemoryMethods(self.world.regions),)

    def _infer(self, data: bytes, context: Any) -> bytes:
        try:
            return self.counted.ask(self.service, data).wait().message()
        except Exception as error:
            raise _refused(error) from None

    def afterwards(self) -> None:
        self.world.check()
        self._count += 1
        if self._count % 64 == 0:
            open_memory = [
                region for region in self.world.regions.regions() if hasattr(region.memory, "address")
            ]
            if len(open_memory) != self.world.driver.opened:
                raise FindingError(f"{self.world.driver.opened} are open for {len(open_memory)} CUDA regions")
            if self._outside.read_bytes() != b"secret" * 16:
                raise FindingError("a file outside of the directory of shared memory was written to")
            self.world.regions.close()
            self.world.register()
            self.world.fill()


def _refused(error: BaseException) -> Refused:
    import grpc

    return Refused(grpc.StatusCode[code_of(error)], str(error))
