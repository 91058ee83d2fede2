"""The threaded gRPC servicer: public grpc API only, the reference for how the service behaves.

Its methods take bytes, so that a message that cannot be parsed gets a clear error.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import grpc

from tensorferry.protos import SERVICE_NAME
from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.errors import InvalidRequestError, ServerError, UnreadResponsesError, UnsupportedError
from tensorferry.server.identity import ANONYMOUS, INFER, ClientIdentity
from tensorferry.server.inference.reply import InferenceReply
from tensorferry.server.inference.service import InferenceService
from tensorferry.server.inference.stream_order import TOO_MANY, parse_stream_options, too_many_streams
from tensorferry.server.model_config.pbtxt import PLATFORM
from tensorferry.server.models.registry import ModelRegistry, ModelState
from tensorferry.server.security.access_control import AccessControl, StreamAuthorization
from tensorferry.server.security.interceptor import certificate_from_context
from tensorferry.server.status import Status, status_of, trailing_metadata
from tensorferry.server.transport.calls_in_progress import Underway
from tensorferry.server.transport.threaded_stream import ResponseStream
from tensorferry.server.transport.unread_responses import SMALL_BYTES, ResponseAccount, UnreadResponses
from tensorferry.server.wire import bounds
from tensorferry.server.wire.receiving import receive

# A deadline that is farther away than a year is none.
_LONGEST_SECONDS = 365 * 86400.0


class _Message(Protocol):
    def SerializeToString(self) -> bytes: ...  # noqa: N802


class Extension(Protocol):
    """Some of the protocol's other methods, and how ServerMetadata names them."""

    @property
    def names(self) -> Sequence[str]:
        """The extensions of the protocol that it is, as Triton names them."""

    def methods(self) -> Mapping[str, Callable[[Any], Any]]:
        """A function of the request message that returns the response, or raises a `ServerError`, by method."""


class ThreadedServicer:
    """The methods of GRPCInferenceService over one service and one registry. Thread-safe.

    Those that `extensions` have are theirs. A call of ModelInfer keeps its thread until it is answered, a stream for as long as it is
    open; `max_streams` bounds the latter, so that streams cannot take every thread.
    """

    def __init__(
        self,
        service: InferenceService,
        registry: ModelRegistry,
        *,
        version: str,
        max_streams: int,
        max_in_flight: int,
        extensions: Sequence[Extension] = (),
        access: AccessControl | None = None,
        unread: UnreadResponses | None = None,
    ) -> None:
        self._unread = unread or UnreadResponses()
        self._underway = Underway()
        self._service = service
        self._registry = registry
        self._version = version
        self._max_streams = max_streams
        self._max_in_flight = max_in_flight
        self._extensions = extensions
        self._access = access
        # Guards _streams. Held to add, remove and list; nothing is called.
        self._lock = threading.Lock()
        self._streams: set[ResponseStream] = set()

    def handler(self) -> grpc.GenericRpcHandler:
        """All methods of the service, to be added to a grpc server."""
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "ModelInfer": grpc.unary_unary_rpc_method_handler(self.model_infer),
            "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(self.model_stream_infer),
        }
        answered: dict[str, Callable[[Any], _Message]] = {
            "ServerLive": self.server_live,
            "ServerReady": self.server_ready,
            "ModelReady": self.model_ready,
            "ServerMetadata": self.server_metadata,
            "ModelMetadata": self.model_metadata,
        }
        for extension in self._extensions:
            answered.update(extension.methods())
        for method in pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods:
            if method.name in methods:
                continue
            answer = answered.get(method.name, _not_implemented(method.name))
            # Files of a model are in the message that has it loaded.
            uploads = method.name == "RepositoryModelLoad"
            most = self._service.limits.message_bytes if uploads else bounds.MAX_MESSAGE_BYTES
            methods[method.name] = grpc.unary_unary_rpc_method_handler(
                _guarded(answer, getattr(pb, method.input_type.name), most),
                response_serializer=getattr(pb, method.output_type.name).SerializeToString,
            )
        return grpc.method_handlers_generic_handler(SERVICE_NAME, methods)

    def server_live(self, request: pb.ServerLiveRequest) -> pb.ServerLiveResponse:
        """True as long as the process answers."""
        return pb.ServerLiveResponse(live=True)

    def server_ready(self, request: pb.ServerReadyRequest) -> pb.ServerReadyResponse:
        """As the service has it."""
        return pb.ServerReadyResponse(ready=self._service.ready)

    def model_ready(self, request: pb.ModelReadyRequest) -> pb.ModelReadyResponse:
        """Whether the model takes requests; false, not an error, for one that is not there."""
        try:
            self._registry.get(request.name, request.version)
        except InvalidRequestError:
            raise
        except ServerError:
            return pb.ModelReadyResponse(ready=False)
        return pb.ModelReadyResponse(ready=not self._service.lame_duck)

    def server_metadata(self, request: pb.ServerMetadataRequest) -> pb.ServerMetadataResponse:
        """Name, version and the extensions that this server has."""
        names = {"binary_tensor_data", "classification", "parameters", "schedule_policy"}
        names.update(*(extension.names for extension in self._extensions))
        return pb.ServerMetadataResponse(name="tensorferry", version=self._version, extensions=sorted(names))

    def model_metadata(self, request: pb.ModelMetadataRequest) -> pb.ModelMetadataResponse:
        """The model's signature; -1 stands for a dimension that varies."""
        model = self._registry.get(request.name, request.version)
        tensor = pb.ModelMetadataResponse.TensorMetadata
        properties = {"batching": model.batching, "batching_verdict": model.batching_verdict}
        if model.signature.optional:
            properties["optional_inputs"] = ",".join(spec.name for spec in model.signature.optional)
        return pb.ModelMetadataResponse(
            name=model.name,
            versions=[
                entry.version
                for entry in self._registry.entries()
                if entry.name == model.name and entry.state is ModelState.READY
            ],
            platform=PLATFORM,
            inputs=[
                tensor(name=s.name, datatype=s.datatype.name, shape=s.shape)
                for s in model.signature.inputs + model.signature.optional
            ],
            outputs=[
                tensor(name=s.name, datatype=s.datatype.name, shape=s.shape) for s in model.signature.outputs
            ],
            properties=properties,
        )

    def model_infer(self, data: bytes, context: grpc.ServicerContext) -> bytes:
        """One request, one response; the thread waits for it."""
        replies: list[InferenceReply] = []
        # A bare lock is the cheapest thing that one thread waits for and another lets go.
        replied = threading.Lock()
        replied.acquire()

        def complete(reply: InferenceReply) -> None:
            replies.append(reply)
            replied.release()

        self._begin(context)
        caller = self._caller_of(context)
        metadata = context.invocation_metadata()
        call = self._service.submit(data, _deadline_of(context), complete, metadata, caller=caller)
        # Called when the client leaves or its deadline passes; false if that has happened.
        if not context.add_callback(call.cancel):
            call.cancel()
        replied.acquire()
        (reply,) = replies
        try:
            message = reply.message()
            if len(message) > SMALL_BYTES:
                self._hold(context, len(message))
            return message
        except BaseException as error:
            # SystemExit, too: a call whose handler ends by that is never ended by grpcio.
            _abort(context, self._service.status_of(error, reply))
        finally:
            if reply.trace is not None:
                reply.trace.sent()

    def model_stream_infer(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Requests as they come; each response in request order, or as it is done.

        The call's metadata chooses: `tensorferry-stream-order: request` (the default) or
        `completion`. An error of one request is a message in the stream, which goes on; or, with
        `triton_grpc_error: true`, the end of the stream.
        """
        self._begin(context)
        metadata = context.invocation_metadata()
        standing = self._standing_of(context)
        options = parse_stream_options(metadata)
        if isinstance(options, Status):
            _abort(context, options)
        stream = ResponseStream(
            self._service,
            _deadline_of(context),
            options=options,
            max_in_flight=self._max_in_flight,
            metadata=metadata,
            standing=standing,
            account=self._account_of(context),
        )
        with self._lock:
            refused = len(self._streams) >= self._max_streams
            if not refused:
                self._streams.add(stream)
        if refused:
            self._service.count_refused(TOO_MANY)
            _abort(context, too_many_streams(self._max_streams))
        try:
            if not context.add_callback(stream.close):
                stream.close()
            if self._service.draining:
                # It came too late for `begin_drain` to find it.
                stream.drain()
            yield from stream.responses(messages)
        finally:
            stream.close()
            with self._lock:
                self._streams.discard(stream)
        if stream.end is not None:
            _abort(context, stream.end)

    def wait_until_over(self, timeout: float) -> bool:
        """Wait until no call is open that began before `begin_drain`; false if some are after `timeout` seconds."""
        return self._underway.wait(timeout)

    def _begin(self, context: grpc.ServicerContext) -> None:
        """Counts a call until it is over, or ends it because its connection has too many answers to read."""
        if not self._service.draining:
            self._underway.add(context)
        if not self._unread.refuses_some:
            return
        error = self._unread.refusal(context.peer())
        if error is not None:
            self._service.count_refused(grpc.StatusCode.RESOURCE_EXHAUSTED)
            _abort(context, self._service.status_of(error))

    def _account_of(self, context: grpc.ServicerContext) -> ResponseAccount:
        def give_up(error: UnreadResponsesError) -> None:
            context.cancel()

        return ResponseAccount(self._unread, context.peer(), give_up)

    def _hold(self, context: grpc.ServicerContext, nbytes: int) -> None:
        """Counts the answer of a unary call until it is sent; UnreadResponsesError if it must not be kept."""
        account = self._account_of(context)
        error = account.add(nbytes)
        if error is not None:
            raise error
        # Called when the call is over, and with it its answer is sent; false if that has happened.
        if not context.add_callback(account.close):
            account.close()

    def _caller_of(self, context: grpc.ServicerContext) -> ClientIdentity:
        if self._access is None:
            return ANONYMOUS
        try:
            return self._access.admit(
                INFER, context.invocation_metadata(), context.peer, lambda: certificate_from_context(context)
            )
        except Exception as error:
            _abort(context, self._service.status_of(error))

    def _standing_of(self, context: grpc.ServicerContext) -> StreamAuthorization | None:
        if self._access is None:
            return None
        try:
            return StreamAuthorization(
                self._access,
                context.invocation_metadata(),
                context.peer,
                lambda: certificate_from_context(context),
            )
        except Exception as error:
            _abort(context, self._service.status_of(error))

    @property
    def open_streams(self) -> int:
        """How many streams are open here."""
        with self._lock:
            return len(self._streams)

    def begin_drain(self) -> None:
        """Open streams end, with UNAVAILABLE, once what they accepted is answered."""
        with self._lock:
            streams = list(self._streams)
        for stream in streams:
            stream.drain()


def _deadline_of(context: grpc.ServicerContext) -> float:
    # Documented as None for a call without a deadline, which grpcio reports as the time to the
    # end of its clock's range.
    remaining: float | None = context.time_remaining()
    if remaining is None or remaining > _LONGEST_SECONDS:
        return math.inf
    return time.monotonic() + remaining


def _guarded(
    answer: Callable[[Any], _Message], kind: Any, most: int
) -> Callable[[bytes, grpc.ServicerContext], _Message]:
    def method(data: bytes, context: grpc.ServicerContext) -> _Message:
        try:
            return answer(receive(data, kind, most))
        except Exception as error:
            _abort(context, status_of(error))

    return method


def _not_implemented(name: str) -> Callable[[Any], _Message]:
    def method(request: Any) -> _Message:
        raise UnsupportedError(f"{name} is not implemented by this server")

    return method


def _abort(context: grpc.ServicerContext, status: Status) -> NoReturn:
    context.set_trailing_metadata(trailing_metadata(status))
    context.abort(status.code, status.message)
