"""A real gRPC server whose answers the test defines."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

from tensorferry.client import StreamRequest
from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos import inference_pb2_grpc, tensors
from tensorferry.protos.model_config_pb2 import ModelConfig

Context = grpc.ServicerContext
Infer = Callable[[pb.ModelInferRequest, Context], pb.ModelInferResponse]
Requests = Iterator[pb.ModelInferRequest]
Answers = Iterator[pb.ModelStreamInferResponse]
Stream = Callable[[Requests, Context], Answers]


def model(name: str, inputs: dict[str, str], outputs: dict[str, str]) -> pb.ModelMetadataResponse:
    """Return metadata from a short form: {"x": "FP32 -1 3"}."""
    message = pb.ModelMetadataResponse(name=name, versions=["1", "2"], platform="onnxruntime_onnx")
    message.properties["owner"] = "vision"
    for target, given in ((message.inputs, inputs), (message.outputs, outputs)):
        for tensor, text in given.items():
            datatype, *shape = text.split()
            target.add(name=tensor, datatype=datatype, shape=map(int, shape))
    return message


def echo(request: pb.ModelInferRequest, context: Context | None = None) -> pb.ModelInferResponse:
    """Return each requested input as an output of the same name, with the request's parameters.

    Where classes are requested, there is one.
    """
    answer = pb.ModelInferResponse(
        model_name=request.model_name, model_version=request.model_version or "2", id=request.id
    )
    for name, value in request.parameters.items():
        answer.parameters[name].CopyFrom(value)
    wanted = {output.name: output for output in request.outputs}
    for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
        if tensor.name in wanted and "classification" in wanted[tensor.name].parameters:
            answer.outputs.add(name=tensor.name, datatype="BYTES", shape=[1])
            answer.raw_output_contents.append(tensors.encode_raw(np.array([b"1:0"], object)))
        elif tensor.name in wanted or not wanted:
            answer.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
            answer.raw_output_contents.append(raw)
    return answer


def echo_typed(request: pb.ModelInferRequest, context: Context | None = None) -> pb.ModelInferResponse:
    """Answer like `echo`, with typed contents."""
    answer = echo(request)
    raw = list(answer.raw_output_contents)
    del answer.raw_output_contents[:]
    for tensor, contents in zip(answer.outputs, raw, strict=True):
        kind = tensors.datatype(tensor.datatype)
        tensors.encode_contents(tensors.decode_raw(contents, kind, tensor.shape), kind, tensor.contents)
    return answer


def streamed(request: pb.ModelInferRequest) -> pb.ModelStreamInferResponse:
    return pb.ModelStreamInferResponse(infer_response=echo(request))


def failed(request_id: str, message: str, status: str = "") -> pb.ModelStreamInferResponse:
    answer = pb.ModelStreamInferResponse(error_message=message)
    answer.infer_response.id = request_id
    if status:
        answer.infer_response.parameters["tensorferry_status"].string_param = status
    return answer


def echo_stream(
    requests: Iterator[pb.ModelInferRequest], context: Context
) -> Iterator[pb.ModelStreamInferResponse]:
    return map(streamed, requests)


def rows(count: int) -> Iterator[StreamRequest]:
    """Return requests for the model `row`, with ids `r0`, `r1` and so on."""
    return (StreamRequest({"x": [number]}, request_id=f"r{number}") for number in range(count))


@dataclass
class Hang:
    """A scripted call that waits until its caller has cancelled it."""

    begun: threading.Event = field(default_factory=threading.Event)
    left: threading.Event = field(default_factory=threading.Event)

    def _wait(self) -> None:
        self.begun.set()
        assert self.left.wait(30)

    def _hear_of_the_end(self, context: Context) -> None:
        if not context.add_callback(self.left.set):
            # The call ended before the callback was registered.
            self.left.set()

    def infer(self, request: object, context: Context) -> Any:
        self._hear_of_the_end(context)
        self._wait()
        context.abort(grpc.StatusCode.CANCELLED, "the caller left")

    def stream(self, requests: Requests, context: Context) -> Answers:
        """Answer only the first request."""
        self._hear_of_the_end(context)
        yield streamed(next(requests))
        self._wait()


class ScriptedServicer(inference_pb2_grpc.GRPCInferenceServiceServicer):
    """Servicer that answers as its attributes say; `calls` has the names of the called methods, `requests` those of ModelInfer."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.requests: list[pb.ModelInferRequest] = []
        self.call_metadata: list[dict[str, str | bytes]] = []
        # Connections of the calls of ModelInfer and ModelStreamInfer.
        self.peers: list[str] = []
        self.models: dict[str, pb.ModelMetadataResponse] = {}
        self.infer: Infer = echo
        self.stream: Stream = echo_stream
        self.ready = True
        self.when_ready: Callable[[object, Context], Any] | None = None
        # Last message of a call that is not inference.
        self.request: Any = None
        self.config = ModelConfig()
        self.shares_memory = False
        self.cuda_status: Callable[[], pb.CudaSharedMemoryStatusResponse] = pb.CudaSharedMemoryStatusResponse
        self.statistics = pb.ModelStatisticsResponse()
        self.failures: list[grpc.StatusCode] = []
        self.failure_trailers: tuple[tuple[str, str], ...] = ()

    def _called(self, name: str, context: Context, request: Any = None) -> None:
        self.request = request
        self.call_metadata.append(dict(context.invocation_metadata()))
        self.calls.append(name)
        if self.failures:
            context.set_trailing_metadata(self.failure_trailers)
            context.abort(self.failures.pop(0), "scripted failure")

    def ServerReady(self, request: Any, context: Context) -> pb.ServerReadyResponse:
        self._called("ServerReady", context)
        if self.when_ready is not None:
            self.when_ready(request, context)
        return pb.ServerReadyResponse(ready=self.ready)

    def ModelMetadata(self, request: Any, context: Context) -> pb.ModelMetadataResponse:
        self._called("ModelMetadata", context)
        if request.name not in self.models:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no model {request.name!r}")
        return self.models[request.name]

    def CudaSharedMemoryStatus(self, request: Any, context: Context) -> Any:
        self._called("CudaSharedMemoryStatus", context, self.request)
        return self.cuda_status()

    def ModelInfer(self, request: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:
        self.peers.append(context.peer())
        self._called("ModelInfer", context)
        self.requests.append(request)
        return self.infer(request, context)

    def ModelStreamInfer(self, requests: Requests, context: Context) -> Answers:
        self.peers.append(context.peer())
        self._called("ModelStreamInfer", context)
        return self.stream(requests, context)


def _index(scripted: ScriptedServicer, request: Any) -> pb.RepositoryIndexResponse:
    answer = pb.RepositoryIndexResponse()
    for name in scripted.models:
        answer.models.add(name=name, version="1", state="READY")
    answer.models.add(name="broken", version="3", state="UNAVAILABLE", reason="no such file")
    return answer


def _traces(scripted: ScriptedServicer, request: Any) -> pb.TraceSettingResponse:
    answer = pb.TraceSettingResponse()
    answer.settings["trace_level"].value.extend(["OFF"])
    for name, setting in request.settings.items():
        answer.settings[name].value.extend(setting.value)
    return answer


def _logs(scripted: ScriptedServicer, request: Any) -> pb.LogSettingsResponse:
    answer = pb.LogSettingsResponse()
    answer.settings["log_info"].bool_param = True
    for name, setting in request.settings.items():
        answer.settings[name].MergeFromString(setting.SerializeToString())
    return answer


# Answers of the methods that are not above; all others are answered with an empty message.
ANSWERS: dict[str, Callable[[ScriptedServicer, Any], Any]] = {
    "ServerLive": lambda scripted, request: pb.ServerLiveResponse(live=True),
    "ModelReady": lambda scripted, request: pb.ModelReadyResponse(ready=request.name in scripted.models),
    "ServerMetadata": lambda scripted, request: pb.ServerMetadataResponse(
        name="scripted", version="9", extensions=["a", "b"]
    ),
    "RepositoryIndex": _index,
    "ModelConfig": lambda scripted, request: pb.ModelConfigResponse(config=scripted.config),
    "ModelStatistics": lambda scripted, request: scripted.statistics,
    "TraceSetting": _traces,
    "LogSettings": _logs,
}


def _method(name: str) -> Any:
    def answer(self: ScriptedServicer, request: Any, context: Context) -> Any:
        self._called(name, context, request)
        if name.endswith("SharedMemoryRegister") and not self.shares_memory:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "no shared memory")
        return ANSWERS[name](self, request) if name in ANSWERS else getattr(pb, f"{name}Response")()

    return answer


for _one in pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods:
    if _one.name not in vars(ScriptedServicer):
        setattr(ScriptedServicer, _one.name, _method(_one.name))


@contextmanager
def serving(handlers: dict[str, Any]) -> Iterator[str]:
    """Serve these methods of the protocol, and yield the address."""
    server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("inference.GRPCInferenceService", handlers)]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


@dataclass(frozen=True, slots=True)
class ScriptedServer:
    """The servicer on a port of 127.0.0.1, listening once `start` is called."""

    servicer: ScriptedServicer
    server: grpc.Server
    target: str

    def metadata_of(self, method: str) -> dict[str, str | bytes]:
        """Return the metadata of the last call of a method."""
        return self.servicer.call_metadata[
            len(self.servicer.calls) - 1 - self.servicer.calls[::-1].index(method)
        ]

    @classmethod
    @contextmanager
    def running(cls) -> Iterator[ScriptedServer]:
        """Start a server with the model `row`, and stop it at the end."""
        scripted = cls.make()
        scripted.servicer.models["row"] = model("row", {"x": "INT64 1"}, {"x": "INT64 1"})
        scripted.server.start()
        yield scripted
        scripted.server.stop(None).wait()

    @classmethod
    def make(cls, credentials: grpc.ServerCredentials | None = None) -> ScriptedServer:
        servicer = ScriptedServicer()
        options = [("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", -1)]
        server = grpc.server(ThreadPoolExecutor(8, thread_name_prefix="scripted"), options=options)
        inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
        if credentials is None:
            port = server.add_insecure_port("127.0.0.1:0")
        else:
            port = server.add_secure_port("127.0.0.1:0", credentials)
        return cls(servicer, server, f"127.0.0.1:{port}")
