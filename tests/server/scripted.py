"""A service whose requests a test answers, behind a real gRPC server in this process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
from server.rig import PATIENCE

from tensorferry.batcher import Cancelled
from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos import inference_pb2_grpc
from tensorferry.server.inference import Call, InferenceService, Metadata, Reply
from tensorferry.server.models import ModelRegistry
from tensorferry.server.servicer import Servicer


class ScriptedCall(Call):
    """Tells the service when the transport withdraws its request."""

    __slots__ = ("_cancelled",)

    def __init__(self, cancelled: Callable[[], None]) -> None:
        super().__init__()
        self._cancelled = cancelled

    def cancel(self) -> None:
        self._cancelled()


class ScriptedService(InferenceService):
    """Keeps requests by their id until the test answers them, or at once with `answer_at_once`. Thread-safe."""

    def __init__(self, registry: ModelRegistry) -> None:
        super().__init__(registry)
        self.answer_at_once: Callable[[str], Reply] | None = None
        # Guards the fields below, and is notified when one of them changes.
        self._changed = threading.Condition()
        self.received: list[str] = []
        self.deadlines: dict[str, float] = {}
        self.metadata: dict[str, Metadata] = {}
        self.cancelled: list[str] = []
        self._waiting: dict[str, Callable[[Reply], None]] = {}

    def infer(
        self, data: bytes, deadline: float, complete: Callable[[Reply], None], metadata: Metadata = ()
    ) -> Call:
        request_id = pb.ModelInferRequest.FromString(data).id
        with self._changed:
            self.received.append(request_id)
            self.deadlines[request_id] = deadline
            self.metadata[request_id] = metadata
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
            complete(failure(request_id, Cancelled("the caller left before the answer was there")))

    def answer(self, *request_ids: str) -> None:
        """Completes requests with responses that have their ids."""
        for request_id in request_ids:
            self._complete(success(request_id))

    def fail(self, request_id: str, error: BaseException) -> None:
        """Completes a request with an error."""
        self._complete(failure(request_id, error))

    def _complete(self, reply: Reply) -> None:
        with self._changed:
            complete = self._waiting.pop(reply.request_id)
        complete(reply)

    def await_received(self, count: int) -> None:
        """Blocks the test until that many requests have come since the beginning."""
        self._await(lambda: len(self.received) >= count)

    def await_cancelled(self, count: int) -> None:
        """Blocks the test until that many have been withdrawn."""
        self._await(lambda: len(self.cancelled) >= count)

    def _await(self, predicate: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(predicate, PATIENCE), (self.received, self.cancelled)


def success(request_id: str, nbytes: int = 0) -> Reply:
    response = pb.ModelInferResponse(id=request_id, model_name="m", raw_output_contents=[bytes(nbytes)])
    return Reply(request_id, lambda: [response.SerializeToString()])


def failure(request_id: str, error: BaseException) -> Reply:
    def build() -> list[bytes]:
        raise error

    return Reply(request_id, build)


class OpenStream:
    """A ModelStreamInfer that a test writes to and reads from as it likes."""

    def __init__(self, channel: grpc.Channel, order: str | None = None, timeout: float = PATIENCE) -> None:
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        method: Any = channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            response_deserializer=pb.ModelStreamInferResponse.FromString,
        )
        metadata = (("tensorferry-stream-order", order),) if order is not None else ()
        self.call: Any = method(iter(self._requests.get, None), timeout=timeout, metadata=metadata)

    def send(self, *request_ids: str) -> None:
        """Sends requests with these ids."""
        for request_id in request_ids:
            self.send_bytes(pb.ModelInferRequest(id=request_id).SerializeToString())

    def send_bytes(self, data: bytes) -> None:
        self._requests.put(data)

    def half_close(self) -> None:
        """Ends the client's side."""
        self._requests.put(None)

    def read(self) -> pb.ModelStreamInferResponse:
        """The next response; the error with which the stream ended, or StopIteration."""
        response: pb.ModelStreamInferResponse = next(self.call)
        return response

    def read_ids(self, count: int) -> list[str]:
        """The ids of the next responses."""
        return [self.read().infer_response.id for _ in range(count)]

    def rest(self) -> list[str]:
        """The ids of all further responses; the stream must end well."""
        return [response.infer_response.id for response in self.call]

    def end(self) -> grpc.RpcError:
        """The error with which the stream ends, with no further response before."""
        try:
            response = next(self.call)
        except grpc.RpcError as error:
            return error
        except StopIteration:
            raise AssertionError("the stream ended well") from None
        raise AssertionError(f"a response: {response}")

    def cancel(self) -> None:
        self.call.cancel()


@dataclass
class Door:
    """A servicer with its service and a channel to it."""

    service: ScriptedService
    servicer: Servicer
    channel: grpc.Channel
    registry: ModelRegistry
    _streams: list[OpenStream] = field(default_factory=list)

    @property
    def stub(self) -> Any:
        return inference_pb2_grpc.GRPCInferenceServiceStub(self.channel)

    def stream(self, *args: Any, **options: Any) -> OpenStream:
        self._streams.append(OpenStream(self.channel, *args, **options))
        return self._streams[-1]

    def be_real(self) -> None:
        """From now on the servicer has a service that parses and decodes, over the same registry."""
        self.servicer._service = InferenceService(self.registry)

    def unary(self, method: str) -> Any:
        """A method that takes and gives bytes."""
        return self.channel.unary_unary(f"/inference.GRPCInferenceService/{method}")

    def infer(self, request_id: str, **options: Any) -> Any:
        """A ModelInfer in flight."""
        return self.stub.ModelInfer.future(pb.ModelInferRequest(id=request_id), **options)


def opened(*, max_streams: int = 100, max_in_flight: int = 64) -> Iterator[Door]:
    """A door, and afterwards the proof that no thread of it is left."""
    before = set(threading.enumerate())
    registry = ModelRegistry()
    service = ScriptedService(registry)
    servicer = Servicer(
        service, registry, version="1.2.3", max_streams=max_streams, max_in_flight=max_in_flight
    )
    threads = ThreadPoolExecutor(32, thread_name_prefix="handler")
    server = grpc.server(threads, options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((servicer.handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    channel = grpc.insecure_channel(f"127.0.0.1:{port}")
    door = Door(service, servicer, channel, registry)
    try:
        yield door
    finally:
        for stream in door._streams:
            stream.cancel()
            stream.half_close()
        channel.close()
        assert server.stop(None).wait(PATIENCE)
        threads.shutdown(wait=True)
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE)
        assert not thread.is_alive(), f"{thread.name} is left behind"
