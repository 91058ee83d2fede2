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
from tensorferry.client.future import InferenceFuture, RetryQueue
from tensorferry.client.inflight import Outcome, id_of
from tensorferry.client.messages import arguments, codec
from tensorferry.client.messages.codec import InferenceResult, Parameter, StreamRequest
from tensorferry.client.messages.metadata import ModelMetadata, ModelStatus, ServerMetadata
from tensorferry.protos import inference_pb2 as pb


class InferenceClient(ClientBase):
    """A client of one server, over one channel. Use it as a context manager, or call `close`.

    Arguments:

    - `target`: "host:port", or any other name that gRPC resolves.
    - `tls`: True for TLS with the system's certificate authorities, or a `Tls` with files.
    - `credentials`: grpcio's channel credentials, instead of `tls`.
    - `metadata`: metadata of every call. A current OpenTelemetry context is added to it.
    - `token`: bearer token of every call. A token that would leave this machine without TLS raises
      InvalidInput, unless `token_over_plaintext` is true.
    - `max_message_bytes`: bound on a message in either direction.
    - `options`: gRPC channel options, which override those of the client.
    - `check`: compare each request with the model's metadata before it is sent (the default).
      If false, the dtype of each array decides its datatype.
    - `retry`: how calls are repeated, None for never.

    The first call connects, not the constructor. Streams use a second connection.

    Retries: a call that got UNAVAILABLE, or RESOURCE_EXHAUSTED with a retry time, is sent again
    within its timeout. A call whose connection broke while it was in progress is sent again at
    most once, and never if it is part of a sequence.

    Timeouts: a positive number of seconds for the whole call, retries included. The timeout
    becomes the gRPC deadline. None and infinity mean no limit.

    Errors: calls raise `InferenceError`. Its subclass follows from the server's status code.
    `InvalidInput` (a ValueError) is raised for unusable arguments, and `ClientClosed`
    (a RuntimeError) after `close`.

    Thread-safe: all methods may be called from any number of threads at once.
    """

    def _open(
        self,
        target: str,
        credentials: grpc.ChannelCredentials | None,
        options: list[tuple[str, str | int]],
    ) -> None:
        # Set by `close`; ends every wait before a retry.
        self._closing = threading.Event()
        self._retry_queue = RetryQueue()
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
        """Close the channels; calls in flight end with `Cancelled`. Idempotent."""
        self._closed = True
        self._closing.set()
        self._retry_queue.close()
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
        """Run one request and wait for its answer.

        `inputs` maps each input name to its array. Lists and Python scalars become arrays of the
        model's datatype if that loses nothing; arrays are never cast. A `version` of "" lets the
        server choose. `outputs` names the requested outputs, None for all.

        Raises InvalidInput before anything is sent if inputs or outputs do not fit the model.
        Thread-safe.
        """
        deadline = Deadline.after(timeout)
        request = codec.request_of(inputs, request_id, outputs, parameters)
        encoded = self._encode(model, version, deadline, request)
        try:
            answer = self._call(self._stub.ModelInfer, encoded, deadline, request.request_id)
        except InferenceError as error:
            self._cache.refused(model, version, error)
            raise
        return codec.decode(answer)

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
        """Send one request and return a `concurrent.futures.Future` of its result.

        Arguments are those of `infer`. Errors after the request was sent are raised by the future.
        `cancel()` of the future cancels the call on the server. The first request for a model
        waits for the model's metadata. Thread-safe.
        """
        deadline = Deadline.after(timeout)
        request = codec.request_of(inputs, request_id, outputs, parameters)
        encoded = self._encode(model, version, deadline, request)
        return InferenceFuture(
            lambda: self._stub.ModelInfer.future(encoded, **self._call_options(deadline, request.request_id)),
            request.request_id,
            functools.partial(self._cache.refused, model, version),
            self._attempts(encoded),
            deadline,
            self._retry_queue,
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
        """Run many requests over one call and yield each result when it arrives.

        `requests` yields dicts as for `infer`, or `StreamRequest` objects with their own id,
        outputs or parameters. Each result has the `id` of its request; a missing id is
        generated. Results come in order of completion, or in request order if `ordered` is true.
        `timeout` covers the whole stream.

        At most `max_in_flight` requests have been taken from `requests` without their result
        being yielded, so a slow consumer slows `requests` down. `requests` is iterated on a
        separate thread, so state that it shares with the consumer needs a lock. An exception of
        `requests` is raised here, after the results of all requests sent before it.

        A failed request raises its InferenceError, with `request_id`, and ends the stream. With
        `on_error="yield"` the error is yielded in place of the result, and the stream continues.
        If the call itself breaks, every request in flight fails with the error of the call. With
        "yield" that error is raised last, for the requests that were never sent.

        Nothing is sent before the first `next()`. Closing or dropping the iterator cancels the
        call and all its requests. One thread at a time may use the iterator.
        """
        plan = self._plan_stream(
            model, version, ordered, max_in_flight, timeout, outputs, parameters, on_error
        )
        return self._stream(plan, map(plan.defaults.complete, codec.iterated(requests)))

    def _stream(self, plan: StreamPlan, requests: Iterator[StreamRequest]) -> Generator[Outcome, None, None]:
        self._check_open()
        deadline = Deadline.after(plan.timeout)
        # Messages of unanswered requests, for those that are sent again.
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
        """Return the model's inputs, outputs and versions, cached until the server refuses a request for it.

        Thread-safe.
        """
        deadline = Deadline.after(timeout)
        arguments.model(model, version)
        return self._cache.get(model, version) or self._fetch(model, version, deadline)

    def server_metadata(self, *, timeout: float | None = None) -> ServerMetadata:
        """Return the server's name, version and extensions. Thread-safe."""
        answer = self._call(self._stub.ServerMetadata, pb.ServerMetadataRequest(), Deadline.after(timeout))
        return ServerMetadata.from_message(answer)

    def models(self, *, timeout: float | None = None) -> tuple[ModelStatus, ...]:
        """Return all models of the server's repository, in any state. Thread-safe."""
        answer = self._call(self._stub.RepositoryIndex, pb.RepositoryIndexRequest(), Deadline.after(timeout))
        return ModelStatus.from_message(answer)

    def is_live(self, *, timeout: float | None = None) -> bool:
        """Return whether the server answers; False if it cannot be reached in time. Thread-safe."""
        answer = self._ask(self._stub.ServerLive, pb.ServerLiveRequest(), timeout)
        return answer is not None and bool(answer.live)

    def is_ready(self, *, timeout: float | None = None) -> bool:
        """Return whether the server is ready; False if it cannot be reached in time. Thread-safe."""
        answer = self._ask(self._stub.ServerReady, pb.ServerReadyRequest(), timeout)
        return answer is not None and bool(answer.ready)

    def is_model_ready(self, model: str, version: str = "", *, timeout: float | None = None) -> bool:
        """Return whether the model is ready; False if the server cannot be reached in time. Thread-safe."""
        arguments.model(model, version)
        answer = self._ask(self._stub.ModelReady, pb.ModelReadyRequest(name=model, version=version), timeout)
        return answer is not None and bool(answer.ready)

    def wait_ready(self, timeout: float | None = None) -> bool:
        """Wait until the server can be reached, then return whether it is ready.

        False if it cannot be reached in time. Use it for a server that is starting: the channel
        connects as soon as the server listens. Thread-safe.
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
        return codec.encode(model, version, request, metadata)

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
        """Send a refused stream request again as a unary call, and return its outcome."""
        attempts = self._attempts(encoded)
        try:
            self._wait(refused, None, attempts, deadline)
            answer = self._call(
                self._stub.ModelInfer, encoded, deadline, refused.request_id, attempts=attempts
            )
            return codec.decode(answer)
        except InferenceError as error:
            return error

    def _wait(self, error: InferenceError, call: Any, attempts: Attempts, deadline: Deadline) -> None:
        """Wait until the failed request may be sent again; raise the error if it may not."""
        delay = attempts.delay(error, call, deadline.left())
        if delay is None:
            raise error from call
        if self._closing.wait(delay):
            raise errors.closed_during_call(error.request_id) from error

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
        """Return the answer to a unary call, which is retried as the policy allows."""
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
