"""A service whose requests the test answers, behind a real gRPC server in this process, on either transport."""

from __future__ import annotations

import gc
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NoReturn

import grpc
from polling import until
from support.server.rig import PATIENCE

from tensorferry.batcher import Cancelled
from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos import inference_pb2_grpc
from tensorferry.server.config.server_config import ServerConfig
from tensorferry.server.identity import ANONYMOUS, ClientIdentity, Metadata
from tensorferry.server.inference.reply import BuiltReply, InferenceCall, InferenceReply
from tensorferry.server.inference.service import InferenceService
from tensorferry.server.methods.core import CoreMethods
from tensorferry.server.models.lifecycle.registry import ModelRegistry
from tensorferry.server.security.access_control import AccessControl
from tensorferry.server.transport.lane.lane import Lane
from tensorferry.server.transport.lane.stream import StreamCall
from tensorferry.server.transport.lane.unary import UnaryCall
from tensorferry.server.transport.threaded_servicer import ThreadedServicer
from tensorferry.server.transport.transport_state import TransportState


class ScriptedCall(InferenceCall):
    """A call that reports its cancellation to the service."""

    __slots__ = ("_cancelled",)

    def __init__(self, cancelled: Callable[[], None]) -> None:
        super().__init__()
        self._cancelled = cancelled

    def cancel(self) -> None:
        self._cancelled()


class ScriptedService(InferenceService):
    """Holds requests by id until the test answers them, or answers at once by `answer_at_once`. Thread-safe."""

    def __init__(self, registry: ModelRegistry) -> None:
        super().__init__(registry)
        self.answer_at_once: Callable[[str], InferenceReply] | None = None
        # Guards the fields below, and is notified when one of them changes.
        self._changed = threading.Condition()
        self.received: list[str] = []
        self.deadlines: dict[str, float] = {}
        self.metadata: dict[str, Metadata] = {}
        self.callers: dict[str, ClientIdentity] = {}
        self.cancelled: list[str] = []
        self._waiting: dict[str, Callable[[InferenceReply], None]] = {}

    def submit(
        self,
        data: bytes,
        deadline: float,
        complete: Callable[[InferenceReply], None],
        metadata: Metadata = (),
        caller: ClientIdentity = ANONYMOUS,
        **options: Any,
    ) -> InferenceCall:
        request_id = pb.ModelInferRequest.FromString(bytes(data)).id
        with self._changed:
            self.received.append(request_id)
            self.deadlines[request_id] = deadline
            self.metadata[request_id] = metadata
            self.callers[request_id] = caller
            if self.answer_at_once is None:
                self._waiting[request_id] = complete
            self._changed.notify_all()
        if self.answer_at_once is not None:
            complete(self.answer_at_once(request_id))
        return ScriptedCall(lambda: self._cancel(request_id))

    def _cancel(self, request_id: str) -> None:
        with self._changed:
            complete = self._waiting.pop(request_id, None)
            if complete is not None:
                self.cancelled.append(request_id)
            self._changed.notify_all()
        if complete is not None:
            complete(failure(request_id, Cancelled("the caller cancelled before the request was answered")))

    def answer(self, *request_ids: str) -> None:
        """Complete requests with responses that have their ids."""
        for request_id in request_ids:
            self._complete(success(request_id))

    def fail(self, request_id: str, error: BaseException) -> None:
        """Complete a request with an error."""
        self._complete(failure(request_id, error))

    def answer_with(self, request_id: str, reply: InferenceReply) -> None:
        """Complete a request with this reply."""
        with self._changed:
            complete = self._waiting.pop(request_id)
        complete(reply)

    def _complete(self, reply: InferenceReply) -> None:
        self.answer_with(reply.request_id, reply)

    def await_received(self, count: int) -> None:
        """Wait until `count` requests have arrived since the start."""
        self._await(lambda: len(self.received) >= count)

    def await_cancelled(self, count: int) -> None:
        """Wait until `count` requests were cancelled."""
        self._await(lambda: len(self.cancelled) >= count)

    def _await(self, predicate: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(predicate, PATIENCE), (self.received, self.cancelled)


def success(request_id: str, nbytes: int = 0) -> InferenceReply:
    response = pb.ModelInferResponse(id=request_id, model_name="m", raw_output_contents=[bytes(nbytes)])
    response.outputs.add(name="y", datatype="UINT8", shape=[nbytes])
    return BuiltReply(request_id, lambda: [response.SerializeToString()])


def failure(request_id: str, error: BaseException) -> InferenceReply:
    def build() -> list[bytes]:
        raise error

    return BuiltReply(request_id, build)


class OpenStream:
    """A ModelStreamInfer that the test writes and reads in any order."""

    def __init__(
        self,
        channel: grpc.Channel,
        order: str | None = None,
        timeout: float = PATIENCE,
        metadata: Sequence[tuple[str, str | bytes]] = (),
    ) -> None:
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        method: Any = channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            response_deserializer=pb.ModelStreamInferResponse.FromString,
        )
        chosen = [("tensorferry-stream-order", order)] if order is not None else []
        self.call: Any = method(
            iter(self._requests.get, None), timeout=timeout, metadata=[*metadata, *chosen]
        )

    def send(self, *request_ids: str) -> None:
        """Send requests with these ids."""
        for request_id in request_ids:
            self.send_bytes(pb.ModelInferRequest(id=request_id).SerializeToString())

    def send_bytes(self, data: bytes) -> None:
        self._requests.put(data)

    def half_close(self) -> None:
        """Send no more requests."""
        self._requests.put(None)

    def read(self) -> pb.ModelStreamInferResponse:
        """Return the next response; raise the error with which the stream ended, or StopIteration."""
        response: pb.ModelStreamInferResponse = next(self.call)
        return response

    def read_ids(self, count: int) -> list[str]:
        """Return the ids of the next responses."""
        return [self.read().infer_response.id for _ in range(count)]

    def rest(self) -> list[str]:
        """Return the ids of all further responses; the stream must end with OK."""
        return [response.infer_response.id for response in self.call]

    def end(self) -> grpc.RpcError:
        """Return the error with which the stream ends; there must be no further response."""
        try:
            response = next(self.call)
        except grpc.RpcError as error:
            return error
        except StopIteration:
            raise AssertionError("the stream ended with OK") from None
        raise AssertionError(f"a response: {response}")

    def cancel(self) -> None:
        self.call.cancel()


class _BesideTheLane(ThreadedServicer):
    """The servicer beside a lane; the lane's two methods must not reach it."""

    def model_infer(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> NoReturn:
        raise AssertionError("ModelInfer did not go through the lane")

    def model_stream_infer(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> NoReturn:
        raise AssertionError("ModelStreamInfer did not go through the lane")


def shared_state(access: AccessControl | None = None, **options: Any) -> TransportState:
    """What transports share, with this access control and these options of a server."""
    shared = TransportState(ServerConfig(models=(), **options))
    shared.access = access
    return shared


def _listen(server: grpc.Server) -> str:
    return f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"


@dataclass
class ServedTransport:
    """A transport with its service and a channel; `lane` is None if the servicer serves all methods."""

    service: ScriptedService
    servicer: ThreadedServicer
    lane: Lane | None
    server: grpc.Server
    address: str
    channel: grpc.Channel
    registry: ModelRegistry
    _streams: list[OpenStream] = field(default_factory=list)

    @property
    def stub(self) -> Any:
        return inference_pb2_grpc.GRPCInferenceServiceStub(self.channel)

    def stream(self, *args: Any, **options: Any) -> OpenStream:
        self._streams.append(OpenStream(self.channel, *args, **options))
        return self._streams[-1]

    def serve_by(self, service: InferenceService) -> None:
        """Serve further calls by another service."""
        self.servicer._service = self.servicer._admission._service = service
        if self.lane is not None:
            self.lane._service = self.lane.admission._service = service

    def be_real(self) -> None:
        """Serve further calls by a real service over the same registry."""
        self.serve_by(InferenceService(self.registry))

    def drain_streams(self) -> None:
        """End open streams as a draining server does."""
        self.servicer.streams.begin_drain()
        if self.lane is not None:
            self.lane.streams.begin_drain()

    def unary(self, method: str) -> Any:
        """Return a method of byte messages."""
        return self.channel.unary_unary(f"/inference.GRPCInferenceService/{method}")

    def infer(self, request_id: str, **options: Any) -> Any:
        """Start a ModelInfer."""
        return self.stub.ModelInfer.future(pb.ModelInferRequest(id=request_id), **options)


def opened(
    transport: str,
    *,
    max_streams: int = 100,
    max_in_flight: int = 64,
    max_calls: int = 1000,
    options: Sequence[tuple[str, Any]] = (),
    listen: Callable[[grpc.Server], str] = _listen,
    stopped_by_test: bool = False,
    access: AccessControl | None = None,
    unpackers: Executor | None = None,
) -> Iterator[ServedTransport]:
    """Yield a served transport; afterwards fail if a thread or an object of the lane is left.

    It does not fail if the test stops the server, because core's events at the end of grpcio's thread are
    lost with their calls.
    """
    before = set(threading.enumerate())
    registry = ModelRegistry()
    registry.mark_complete()
    service = ScriptedService(registry)
    limits: dict[str, Any] = {"max_streams": max_streams, "max_in_flight": max_in_flight}
    shared = shared_state(access, max_calls=max_calls)
    by_lane = transport == "lane"
    kind = _BesideTheLane if by_lane else ThreadedServicer
    core_methods = CoreMethods(service, registry, version="1.2.3")
    servicer = kind(service, shared, extensions=[core_methods], **limits)
    threads = ThreadPoolExecutor(32, thread_name_prefix="handler")
    server = grpc.server(threads, options=[("grpc.so_reuseport", 0), *options])
    server.add_generic_rpc_handlers((servicer.handler(),))
    lane = Lane(server, service, shared, unpackers=unpackers, **limits) if by_lane else None
    address = listen(server)
    server.start()
    if lane is not None:
        lane.start()
    served = ServedTransport(
        service, servicer, lane, server, address, grpc.insecure_channel(address), registry
    )
    try:
        yield served
    finally:
        for stream in served._streams:
            stream.cancel()
            stream.half_close()
        served.channel.close()
        if lane is not None and not stopped_by_test:
            await_no_calls(lane)
        assert server.stop(None).wait(PATIENCE)
        threads.shutdown(wait=True)
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE)
        assert not thread.is_alive(), f"{thread.name} is left behind"
    if lane is not None and not stopped_by_test:
        left = weakref.ref(lane)
        served.lane = lane = None
        served.server = server = None  # type: ignore[assignment]
        gc.collect()
        assert left() is None, "the lane is left behind, perhaps with one of its events"


def error_of(call: Any) -> Any:
    """Wait for the error of a call in flight."""
    error = call.exception(PATIENCE)
    assert isinstance(error, grpc.RpcError)
    return error


def calls_of(lane: Lane) -> list[UnaryCall | StreamCall]:
    """Return all calls of the lane in this process, ended or not."""
    calls: list[UnaryCall | StreamCall] = []
    for thing in gc.get_objects():
        if (type(thing) is UnaryCall and thing._owner is lane) or (
            type(thing) is StreamCall and thing._owner is lane
        ):
            calls.append(thing)
    return calls


def await_no_calls(lane: Lane) -> None:
    """Wait until the last call is released, without the garbage collector."""
    until(lambda: not calls_of(lane))
