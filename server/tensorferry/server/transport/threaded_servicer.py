"""The threaded gRPC servicer: public grpc API only, the reference for how the service behaves.

Its methods take bytes, so that a message that cannot be parsed gets a clear error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, Protocol

import grpc
from google.protobuf.message import Message

from tensorferry.protos import SERVICE_NAME
from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.errors import UnreadResponsesError, UnsupportedError
from tensorferry.server.inference.reply import InferenceReply
from tensorferry.server.inference.service import InferenceService
from tensorferry.server.security.interceptor import certificate_from_context
from tensorferry.server.status import Status, StatusCode, status_of, trailing_metadata
from tensorferry.server.transport.call_admission import CallAdmission, Refusal, deadline_after
from tensorferry.server.transport.stream_registry import StreamRegistry
from tensorferry.server.transport.threaded_stream import ResponseStream
from tensorferry.server.transport.transport_state import TransportState
from tensorferry.server.transport.unread_responses import SMALL_BYTES, ResponseAccount
from tensorferry.server.wire import bounds
from tensorferry.server.wire.receiving import receive

_SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]


class Extension(Protocol):
    """Some methods of the protocol, and the names by which ServerMetadata reports them."""

    @property
    def names(self) -> Sequence[str]:
        """The extensions' names, as Triton has them."""

    def methods(self) -> Mapping[str, Callable[[Any], Any]]:
        """Return functions by method name. Each takes a request message and returns the response, or raises a `ServerError`."""


def methods_of(extensions: Sequence[Extension]) -> Mapping[str, Callable[[Any], Any]]:
    """Return a function for each method of the protocol. It raises UnsupportedError if no extension has the method."""
    methods: dict[str, Callable[[Any], Any]] = {
        method.name: partial(_refuse, method.name) for method in _SERVICE.methods
    }
    for extension in extensions:
        methods.update(extension.methods())
    return methods


def _refuse(name: str, request: Any) -> NoReturn:
    raise UnsupportedError(f"{name} is not implemented by this server")


class ThreadedServicer:
    """The methods of GRPCInferenceService over one service. Thread-safe.

    `shared` is that of all transports. `extensions` implement all methods but ModelInfer and ModelStreamInfer. A ModelInfer
    call occupies a thread until it is answered, and an open stream occupies two. `max_streams` is therefore less than the
    number of threads.
    """

    def __init__(
        self,
        service: InferenceService,
        shared: TransportState,
        *,
        max_streams: int,
        max_in_flight: int,
        extensions: Sequence[Extension] = (),
    ) -> None:
        self._service = service
        self._max_in_flight = max_in_flight
        self._extensions = extensions
        self._unread = shared.unread
        self._admission: CallAdmission[grpc.ServicerContext] = CallAdmission(
            service,
            shared,
            peer_of=lambda context: context.peer(),
            certificate_of=certificate_from_context,
        )
        self.streams = StreamRegistry(max_streams, service.count_refused)

    def handler(self) -> grpc.GenericRpcHandler:
        """Return all methods of the service, to be added to a grpc server."""
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            # With a stream of requests the method is called before the message is read, and can refuse the call.
            "ModelInfer": grpc.stream_unary_rpc_method_handler(self.model_infer),
            "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(self.model_stream_infer),
        }
        answers = methods_of(self._extensions)
        for method in _SERVICE.methods:
            if method.name in methods:
                continue
            # The message that loads a model may have the model's files.
            uploads = method.name == "RepositoryModelLoad"
            max_bytes = self._service.limits.message_bytes if uploads else bounds.MAX_MESSAGE_BYTES
            methods[method.name] = grpc.unary_unary_rpc_method_handler(
                _method(answers[method.name], getattr(pb, method.input_type.name), max_bytes),
                response_serializer=getattr(pb, method.output_type.name).SerializeToString,
            )
        return grpc.method_handlers_generic_handler(SERVICE_NAME, methods)

    def model_infer(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        """Answer one request; the thread waits for the reply."""
        metadata = context.invocation_metadata()
        admitted, deadline = self._admission.admit_unary(context, metadata, context.time_remaining())
        if isinstance(admitted, Refusal):
            _abort(context, admitted.status)
        _when_over(context, self._admission.calls.end_unary)
        try:
            data = next(messages, None)
        except grpc.RpcError as left:
            # The client has left, so the result is not sent. grpcio keeps the exception with the call, which the exception's
            # frames refer to.
            left.__traceback__ = None
            return b""
        if data is None:
            context.abort(
                StatusCode.UNIMPLEMENTED, f"/{SERVICE_NAME}/ModelInfer requires exactly one request message"
            )
        replies: list[InferenceReply] = []
        # A bare lock is the cheapest way to wait for another thread.
        replied = threading.Lock()
        replied.acquire()

        def complete(reply: InferenceReply) -> None:
            replies.append(reply)
            replied.release()

        call = self._service.submit(data, deadline, complete, metadata, caller=admitted)
        _when_over(context, call.cancel)
        replied.acquire()
        (reply,) = replies
        try:
            message = reply.message()
            if len(message) > SMALL_BYTES:
                self._count_response(context, len(message))
            return message
        except BaseException as error:
            # Every exception, because grpcio never ends a call whose handler raises SystemExit.
            _abort(context, self._service.status_of(error, reply))
        finally:
            if reply.trace is not None:
                reply.trace.sent()

    def model_stream_infer(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Answer requests as they come, in request order or as they complete.

        The call's metadata chooses: `tensorferry-stream-order: request` (the default) or `completion`. The error of one
        request is a message in the stream; with `triton_grpc_error: true` it ends the stream.
        """
        metadata = context.invocation_metadata()
        admitted = self._admission.admit_stream(context, metadata)
        if isinstance(admitted, Refusal):
            _abort(context, admitted.status)
        self._admission.calls.begin_stream()
        _when_over(context, self._admission.calls.end_stream)
        stream = ResponseStream(
            self._service,
            deadline_after(context.time_remaining()),
            admission=admitted,
            max_in_flight=self._max_in_flight,
            metadata=metadata,
            unread=self._unread,
            account=self._account_of(context),
        )
        refusal = self.streams.register(stream)
        if refusal is not None:
            _abort(context, refusal)
        try:
            _when_over(context, stream.close)
            yield from stream.responses(messages)
        finally:
            stream.close()
            self.streams.unregister(stream)
        if stream.end is not None:
            _abort(context, stream.end)

    def _account_of(self, context: grpc.ServicerContext) -> ResponseAccount:
        def give_up(error: UnreadResponsesError) -> None:
            context.cancel()

        return ResponseAccount(context.peer(), give_up)

    def _count_response(self, context: grpc.ServicerContext, nbytes: int) -> None:
        """Count the response of a unary call until it is sent; UnreadResponsesError if it must not be kept."""
        account = self._account_of(context)
        error = self._unread.add(account, nbytes)
        if error is not None:
            raise error
        _when_over(context, partial(self._unread.close, account))


def _when_over(context: grpc.ServicerContext, callback: Callable[[], None]) -> None:
    """Call back when the response is sent, the client has left or its deadline has passed; at once if that has happened."""
    if not context.add_callback(callback):
        callback()


def _method(
    answer: Callable[[Any], Message], kind: type[Message], max_bytes: int
) -> Callable[[bytes, grpc.ServicerContext], Message]:
    def method(data: bytes, context: grpc.ServicerContext) -> Message:
        try:
            return answer(receive(data, kind, max_bytes))
        except Exception as error:
            _abort(context, status_of(error))

    return method


def _abort(context: grpc.ServicerContext, status: Status) -> NoReturn:
    context.set_trailing_metadata(trailing_metadata(status))
    context.abort(status.code, status.message)
