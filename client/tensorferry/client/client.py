"""The synchronous client."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self, overload

import grpc

from tensorferry.client import errors, stream
from tensorferry.client.base import ClientBase, StreamPlan
from tensorferry.client.connection import channel
from tensorferry.client.connection.deadline import Deadline
from tensorferry.client.connection.propagation import with_context
from tensorferry.client.connection.retry import Attempts
from tensorferry.client.errors import DeadlineExceeded, InferenceError, ResourceExhausted, Unavailable
from tensorferry.client.future import InferenceFuture, Waiting
from tensorferry.client.inflight import Outcome, id_of
from tensorferry.client.messages import arguments, tensors
from tensorferry.client.messages.metadata import ModelMetadata, ModelStatus, ServerMetadata
from tensorferry.client.messages.tensors import InferenceResult, Parameter, StreamRequest
from tensorferry.protos import inference_pb2 as pb


class InferenceClient(ClientBase):
    """A client of one server, over one channel. Use it as a context manager, or call `close`.

    `target` is "host:port", or any other name that gRPC resolves. `tls` is True for TLS with
    the system's authorities, or a `Tls` with files; `credentials` takes grpcio's own instead.
    `metadata` is sent with every call, and the current OpenTelemetry context where the program
    has one, and `token` as a bearer token; InvalidInput where it would leave this machine without TLS, unless
    `token_over_plaintext`. `max_message_bytes` bounds a message in either direction. `options` are channel
    options of gRPC that go before ours. With `check` (the default) each request is held against
    the model's metadata before it is sent; without, the dtype of each array says what it travels as.

    The constructor does not connect; the first call does. Streams have a second connection. Calls
    that met UNAVAILABLE, and requests that an overloaded server refused with a time to come back, are
    sent again as `retry` says (None: never), within their timeout; a call whose connection broke while
    it was in progress at most once, and not as part of a sequence. Every `timeout` is a positive number
    of seconds over all that the call does, and becomes the gRPC deadline; None and infinity wait for
    ever. Calls raise `InferenceError`: of the server in the class of its status code, `InvalidInput` (a
    ValueError) for values of the caller that cannot be used, `ClientClosed` (a RuntimeError) after
    `close`.

    Thread-safe: all methods may be called from any number of threads at once.
    """

    def _open(
        self,
        target: str,
        credentials: grpc.ChannelCredentials | None,
        options: list[tuple[str, str | int]],
    ) -> None:
        # Ends the waits of those who are to send again.
        self._closing = threading.Event()
        self._waiting = Waiting()
        self._channel = channel.sync_channel(target, credentials, options)
        self._stream_channel = channel.sync_channel(target, credentials, channel.stream_options(options))
        self._stub = channel.stub(self._channel)
        self._stream_stub = channel.stub(self._stream_channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the channels; calls in flight end with `Cancelled`. May be called again."""
        self._closed = True
        self._closing.set()
        self._waiting.close()
        self._channel.close()
        self._stream_channel.close()

    def infer(
        self,
        model: str,
        inputs: Mapping[str, object],
        *,
        version: str = "",
        timeout: float | None = None,
        outputs: Sequence[str] | None = None,
        request_id: str | None = None,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> InferenceResult:
        """Runs one request and waits for its answer.

        `inputs` maps each input of the model to its array. Lists and Python scalars become
        arrays of the model's datatype where that loses nothing; arrays are never cast. A
        `version` of "" is the server's choice. `outputs` names the outputs wanted, None for
        all.

        InvalidInput, before anything is sent, when inputs or outputs do not fit the model.
        Thread-safe.
        """
        deadline = Deadline.after(timeout)
        request = tensors.request_of(inputs, request_id, outputs, parameters)
        encoded = self._encode(model, version, deadline, request)
        try:
            answer = self._call(self._stub.ModelInfer, encoded, deadline, request.request_id)
        except InferenceError as error:
            self._cache.refused(model, version, error)
            raise
        return tensors.decode(answer)

    def submit(
        self,
        model: str,
        inputs: Mapping[str, object],
        *,
        version: str = "",
        timeout: float | None = None,
        outputs: Sequence[str] | None = None,
        request_id: str | None = None,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> InferenceFuture:
        """Sends one request and returns a `concurrent.futures.Future` of its result.

        Everything is as for `infer`; what `infer` raises once the request is on its way, the
        future raises. `cancel()` of the future cancels the call on the server. The first
        request for a model waits for the model's metadata. Thread-safe.
        """
        deadline = Deadline.after(timeout)
        request = tensors.request_of(inputs, request_id, outputs, parameters)
        encoded = self._encode(model, version, deadline, request)
        return InferenceFuture(
            lambda: self._stub.ModelInfer.future(encoded, **self._call_options(deadline, request.request_id)),
            request.request_id,
            functools.partial(self._cache.refused, model, version),
            self._attempts(encoded),
            deadline,
            self._waiting,
        )

    @overload
    def stream(
        self,
        model: str,
        requests: Iterable[Mapping[str, object] | StreamRequest],
        *,
        version: str = ...,
        ordered: bool = ...,
        max_in_flight: int = ...,
        timeout: float | None = ...,
        outputs: Sequence[str] | None = ...,
        parameters: Mapping[str, Parameter] | None = ...,
        on_error: Literal["raise"] = ...,
    ) -> Generator[InferenceResult, None, None]: ...

    @overload
    def stream(
        self,
        model: str,
        requests: Iterable[Mapping[str, object] | StreamRequest],
        *,
        version: str = ...,
        ordered: bool = ...,
        max_in_flight: int = ...,
        timeout: float | None = ...,
        outputs: Sequence[str] | None = ...,
        parameters: Mapping[str, Parameter] | None = ...,
        on_error: Literal["yield"],
    ) -> Generator[InferenceResult | InferenceError, None, None]: ...

    def stream(
        self,
        model: str,
        requests: Iterable[Mapping[str, object] | StreamRequest],
        *,
        version: str = "",
        ordered: bool = False,
        max_in_flight: int = 64,
        timeout: float | None = None,
        outputs: Sequence[str] | None = None,
        parameters: Mapping[str, Parameter] | None = None,
        on_error: Literal["raise", "yield"] = "raise",
    ) -> Generator[InferenceResult | InferenceError, None, None]:
        """Runs many requests over one call and yields each result as it is there.

        `requests` yields dicts as for `infer`, or `StreamRequest` for an id, outputs or
        parameters of its own. Each result carries the `id` of its request; ids are generated
        where none is given. Results come as they finish, or with `ordered` in the order of the
        requests. `timeout` is that of the whole stream.

        At most `max_in_flight` requests are pulled and not yet yielded: when the consumer is
        slow, `requests` waits. It is pulled on a thread of its own, which must not touch what
        the consumer uses without a lock. What it raises is raised here, after the results of
        all that was sent.

        A request that fails raises its InferenceError, with `request_id`, and ends the stream;
        with `on_error="yield"` the error is yielded in place of the result and the stream goes
        on. When the call itself breaks, every request in flight fails with its error; under
        "yield" that error is then raised, for the requests that were never sent.

        Nothing is sent before the first `next()`. Closing the iterator (dropping it does so,
        too) cancels the call and all its requests. One thread at a time may use the iterator.
        """
        plan = self._plan_stream(
            model, version, ordered, max_in_flight, timeout, outputs, parameters, on_error
        )
        return self._stream(plan, map(plan.defaults.complete, tensors.iterated(requests)))

    def _stream(self, plan: StreamPlan, requests: Iterator[StreamRequest]) -> Generator[Outcome, None, None]:
        self._check_open()
        deadline = Deadline.after(plan.timeout)
        # Until they are answered, for those that are refused.
        sent: dict[str, pb.ModelInferRequest] = {}

        def encode(request: StreamRequest) -> pb.ModelInferRequest:
            encoded = self._encode(plan.model, plan.version, deadline, request)
            if self._retries.possible:
                sent[request.request_id] = encoded
            return encoded

        outcomes = stream.run(
            lambda feed: self._stream_stub.ModelStreamInfer(
                feed, timeout=deadline.for_call(), metadata=with_context(self._metadata + plan.order)
            ),
            requests,
            encode,
            plan.in_flight,
        )
        with contextlib.closing(outcomes):
            for outcome in outcomes:
                encoded = sent.pop(id_of(outcome), None)
                if isinstance(outcome, InferenceResult):
                    self._retries.answered()
                elif isinstance(outcome, ResourceExhausted) and encoded is not None:
                    outcome = self._again(outcome, encoded, deadline)
                if isinstance(outcome, InferenceError):
                    self._cache.refused(plan.model, plan.version, outcome)
                    if plan.raises:
                        raise outcome
                yield outcome

    def metadata(self, model: str, version: str = "", *, timeout: float | None = None) -> ModelMetadata:
        """The model's inputs, outputs and versions; kept until the server refuses a request for it.

        Thread-safe.
        """
        deadline = Deadline.after(timeout)
        arguments.model(model, version)
        return self._cache.get(model, version) or self._fetch(model, version, deadline)

    def server_metadata(self, *, timeout: float | None = None) -> ServerMetadata:
        """The server's name, version and extensions. Thread-safe."""
        answer = self._call(self._stub.ServerMetadata, pb.ServerMetadataRequest(), Deadline.after(timeout))
        return ServerMetadata.from_message(answer)

    def models(self, *, timeout: float | None = None) -> tuple[ModelStatus, ...]:
        """The models of the server's repository, whatever their state. Thread-safe."""
        answer = self._call(self._stub.RepositoryIndex, pb.RepositoryIndexRequest(), Deadline.after(timeout))
        return ModelStatus.from_message(answer)

    def is_live(self, *, timeout: float | None = None) -> bool:
        """Whether the server answers; False when it cannot be reached in time. Thread-safe."""
        answer = self._ask(self._stub.ServerLive, pb.ServerLiveRequest(), timeout)
        return answer is not None and bool(answer.live)

    def is_ready(self, *, timeout: float | None = None) -> bool:
        """Whether the server is ready; False when it cannot be reached in time. Thread-safe."""
        answer = self._ask(self._stub.ServerReady, pb.ServerReadyRequest(), timeout)
        return answer is not None and bool(answer.ready)

    def is_model_ready(self, model: str, version: str = "", *, timeout: float | None = None) -> bool:
        """Whether the model is ready; False when the server cannot be reached in time. Thread-safe."""
        arguments.model(model, version)
        answer = self._ask(self._stub.ModelReady, pb.ModelReadyRequest(name=model, version=version), timeout)
        return answer is not None and bool(answer.ready)

    def wait_ready(self, timeout: float | None = None) -> bool:
        """Waits until the server can be reached, then says whether it is ready.

        False when it cannot be reached in time. For a server that is just being started: the
        channel connects as soon as the server listens. Thread-safe.
        """
        answer = self._ask(self._stub.ServerReady, pb.ServerReadyRequest(), timeout, wait_for_ready=True)
        return answer is not None and bool(answer.ready)

    def _encode(
        self, model: str, version: str, deadline: Deadline, request: StreamRequest
    ) -> pb.ModelInferRequest:
        encoded = self._encode_known(model, version, request)
        if encoded is not None:
            return encoded
        metadata = self._fetch(model, version, deadline, request.request_id)
        return tensors.encode(model, version, request, metadata)

    def _fetch(self, model: str, version: str, deadline: Deadline, request_id: str = "") -> ModelMetadata:
        request = pb.ModelMetadataRequest(name=model, version=version)
        answer = self._call(self._stub.ModelMetadata, request, deadline, request_id)
        return self._learned(model, version, answer)

    def _ask(
        self, method: Callable[..., Any], request: object, timeout: float | None, wait_for_ready: bool = False
    ) -> Any | None:
        try:
            return self._call(method, request, Deadline.after(timeout), wait_for_ready=wait_for_ready)
        except (Unavailable, DeadlineExceeded):
            return None

    def _again(
        self, refused: ResourceExhausted, encoded: pb.ModelInferRequest, deadline: Deadline
    ) -> Outcome:
        """What becomes of a request of a stream that was refused: it is sent again, as a call of its own."""
        attempts = self._attempts(encoded)
        try:
            self._wait(refused, None, attempts, deadline)
            answer = self._call(
                self._stub.ModelInfer, encoded, deadline, refused.request_id, attempts=attempts
            )
            return tensors.decode(answer)
        except InferenceError as error:
            return error

    def _wait(self, error: InferenceError, call: Any, attempts: Attempts, deadline: Deadline) -> None:
        """Waits until a request may be sent again that met this error; raises that when it is not to be."""
        delay = attempts.delay(error, call, deadline.left())
        if delay is None:
            raise error from call
        if self._closing.wait(delay):
            raise errors.closed(error.request_id) from error

    def _call(
        self,
        method: Callable[..., Any],
        request: object,
        deadline: Deadline,
        request_id: str = "",
        *,
        wait_for_ready: bool = False,
        attempts: Attempts | None = None,
    ) -> Any:
        """The answer to a unary call, which is sent again where that is safe and of use."""
        attempts = attempts or self._attempts(request)
        while True:
            options = self._call_options(deadline, request_id, wait_for_ready=wait_for_ready)
            try:
                answer = method(request, **options)
            except grpc.RpcError as error:
                failure = errors.from_rpc(error, request_id)
                self._wait(failure, error, attempts, deadline)
            else:
                attempts.answered()
                return answer
