"""The threaded gRPC servicer: public grpc API only, the reference for how the service behaves.

Its methods take bytes, so that a message that cannot be parsed gets a clear error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, Protocol

import grpc

from tensorferry.protos import SERVICE_NAME
from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.errors import UnreadResponsesError, UnsupportedError
from tensorferry.server.inference.reply import InferenceReply
from tensorferry.server.inference.service import InferenceService
from tensorferry.server.security.access_control import AccessControl
from tensorferry.server.security.interceptor import certificate_from_context
from tensorferry.server.status import Status, StatusCode, status_of, trailing_metadata
from tensorferry.server.transport.call_admission import CallAdmission, OpenCalls, Refusal, deadline_after
from tensorferry.server.transport.stream_registry import StreamRegistry
from tensorferry.server.transport.threaded_stream import ResponseStream
from tensorferry.server.transport.unread_responses import SMALL_BYTES, ResponseAccount, UnreadResponses
from tensorferry.server.wire import bounds
from tensorferry.server.wire.receiving import receive


class _Message(Protocol):
    def SerializeToString(self) -> bytes: ...  # noqa: N802


class Extension(Protocol):
    """Some methods of the protocol, and the names by which ServerMetadata reports them."""

    @property
    def names(self) -> Sequence[str]:
        """The extensions' names, as Triton has them."""

    def methods(self) -> Mapping[str, Callable[[Any], Any]]:
        """Return functions by method name. Each takes a request message and returns the response, or raises a `ServerError`."""


class ThreadedServicer:
    """The methods of GRPCInferenceService over one service. Thread-safe.

    `extensions` implement all methods but ModelInfer and ModelStreamInfer. A ModelInfer call occupies a thread
    until it is answered, and an open stream occupies two. `max_streams` is therefore less than the number of threads.
    """

    def __init__(
        self,
        service: InferenceService,
        *,
        max_streams: int,
        max_in_flight: int,
        calls: OpenCalls | None = None,
        extensions: Sequence[Extension] = (),
        access: AccessControl | None = None,
        unread: UnreadResponses | None = None,
    ) -> None:
        self._service = service
        self._max_in_flight = max_in_flight
        self._extensions = extensions
        self._unread = unread or UnreadResponses()
        self._admission: CallAdmission[grpc.ServicerContext] = CallAdmission(
            service,
            access=access,
            unread=self._unread,
            calls=calls or OpenCalls(),
            peer_of=lambda context: context.peer(),
            certificate_of=certificate_from_context,
        )
        self._streams = StreamRegistry(max_streams, service.count_refused)

    def handler(self) -> grpc.GenericRpcHandler:
        """Return all methods of the service, to be added to a grpc server."""
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            # With a stream of requests the method is called before the message is read, and can refuse the call.
            "ModelInfer": grpc.stream_unary_rpc_method_handler(self.model_infer),
            "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(self.model_stream_infer),
        }
        implemented: dict[str, Callable[[Any], _Message]] = {}
        for extension in self._extensions:
            implemented.update(extension.methods())
        for method in pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods:
            if method.name in methods:
                continue
            answer = implemented.get(method.name, _not_implemented(method.name))
            # The message that loads a model may have the model's files.
            uploads = method.name == "RepositoryModelLoad"
            max_bytes = self._service.limits.message_bytes if uploads else bounds.MAX_MESSAGE_BYTES
            methods[method.name] = grpc.unary_unary_rpc_method_handler(
                _method(answer, getattr(pb, method.input_type.name), max_bytes),
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
        data = next(messages, None)
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
        refusal = self._streams.register(stream)
        if refusal is not None:
            _abort(context, refusal)
        try:
            _when_over(context, stream.close)
            yield from stream.responses(messages)
        finally:
            stream.close()
            self._streams.unregister(stream)
        if stream.end is not None:
            _abort(context, stream.end)

    def wait_until_over(self, timeout: float) -> bool:
        """Wait until no call is open, after `begin_drain`; return false if some are after `timeout` seconds."""
        return self._admission.calls.wait_until_none(timeout)

    @property
    def open_streams(self) -> int:
        """The number of open streams."""
        return self._streams.open_streams

    def begin_drain(self) -> None:
        """End open streams with UNAVAILABLE once every request that was read is answered."""
        self._streams.begin_drain()

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
    answer: Callable[[Any], _Message], kind: Any, max_bytes: int
) -> Callable[[bytes, grpc.ServicerContext], _Message]:
    def method(data: bytes, context: grpc.ServicerContext) -> _Message:
        try:
            return answer(receive(data, kind, max_bytes))
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
