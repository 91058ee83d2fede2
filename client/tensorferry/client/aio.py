"""Asyncio client with the methods of `tensorferry.client.InferenceClient`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self, overload

import grpc

from tensorferry.client import aio_stream, errors
from tensorferry.client.base import ClientBase, StreamPlan
from tensorferry.client.connection import channel
from tensorferry.client.connection.deadline import Deadline
from tensorferry.client.connection.propagation import with_context
from tensorferry.client.connection.retry import Attempts
from tensorferry.client.errors import DeadlineExceeded, InferenceError, ResourceExhausted, Unavailable
from tensorferry.client.inflight import Outcome, id_of
from tensorferry.client.messages import arguments, codec
from tensorferry.client.messages.codec import InferenceResult, Parameter, StreamRequest
from tensorferry.client.messages.metadata import ModelMetadata, ModelStatus, ServerMetadata
from tensorferry.protos import inference_pb2 as pb


class InferenceClient(ClientBase):
    """A client of one server, over one channel. Use it with `async with`, or await `close`.

    Arguments, retries, timeouts and errors are those of `tensorferry.client.InferenceClient`.

    Not thread-safe: a client belongs to the event loop in which it is created. Any number of tasks
    of that loop may use it at once.
    """

    def _open(
        self,
        target: str,
        credentials: grpc.ChannelCredentials | None,
        options: list[tuple[str, str | int]],
    ) -> None:
        # Set by `close`; ends every wait before a retry.
        self._closing = asyncio.Event()
        self._channel = channel.aio_channel(target, credentials, options)
        self._stream_channel = channel.aio_channel(target, credentials, channel.stream_options(options))
        self._stub = channel.stub(self._channel)
        self._stream_stub = channel.stub(self._stream_channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the channels; calls in flight end with `Cancelled`. Idempotent."""
        self._closed = True
        self._closing.set()
        await self._channel.close()
        await self._stream_channel.close()

    async def infer(
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
        """
        deadline = Deadline.after(timeout)
        request = codec.request_of(inputs, request_id, outputs, parameters)
        encoded = await self._encode(model, version, deadline, request)
        try:
            answer = await self._call(self._stub.ModelInfer, encoded, deadline, request.request_id)
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
    ) -> asyncio.Task[InferenceResult]:
        """Send one request and return an `asyncio.Task` of its result.

        Arguments are those of `infer`. The task raises every error. `cancel()` of the task
        cancels the call on the server.
        """
        return asyncio.create_task(
            self.infer(
                model,
                inputs,
                version=version,
                timeout=timeout,
                outputs=outputs,
                request_id=request_id,
                parameters=parameters,
            )
        )

    @overload
    def stream(
        self,
        model: str,
        requests: aio_stream.Requests,
        *,
        version: str = ...,
        ordered: bool = ...,
        max_in_flight: int = ...,
        timeout: float | None = ...,
        outputs: Sequence[str] | None = ...,
        parameters: Mapping[str, Parameter] | None = ...,
        on_error: Literal["raise"] = ...,
    ) -> AsyncGenerator[InferenceResult]: ...

    @overload
    def stream(
        self,
        model: str,
        requests: aio_stream.Requests,
        *,
        version: str = ...,
        ordered: bool = ...,
        max_in_flight: int = ...,
        timeout: float | None = ...,
        outputs: Sequence[str] | None = ...,
        parameters: Mapping[str, Parameter] | None = ...,
        on_error: Literal["yield"],
    ) -> AsyncGenerator[InferenceResult | InferenceError]: ...

    def stream(
        self,
        model: str,
        requests: aio_stream.Requests,
        *,
        version: str = "",
        ordered: bool = False,
        max_in_flight: int = 64,
        timeout: float | None = None,
        outputs: Sequence[str] | None = None,
        parameters: Mapping[str, Parameter] | None = None,
        on_error: Literal["raise", "yield"] = "raise",
    ) -> AsyncGenerator[InferenceResult | InferenceError]:
        """Run many requests over one call and yield each result when it arrives.

        `requests` yields dicts as for `infer`, or `StreamRequest` objects with their own id,
        outputs or parameters. Each result has the `id` of its request; a missing id is
        generated. Results come in order of completion, or in request order if `ordered` is true.
        `timeout` covers the whole stream.

        At most `max_in_flight` requests have been taken from `requests` without their result
        being yielded, so a slow consumer slows `requests` down. `requests` is a plain or an
        asynchronous iterable, and is iterated in a separate task. Its exception is raised here,
        after the results of all requests sent before it.

        A failed request raises its InferenceError, with `request_id`, and ends the stream. With
        `on_error="yield"` the error is yielded in place of the result, and the stream continues.
        If the call itself breaks, every request in flight fails with the error of the call. With
        "yield" that error is raised last, for the requests that were never sent.

        Nothing is sent before the first `anext()`. `aclose()` cancels the call and all its
        requests. Leaving an `async for` early cancels them only when the iterator is garbage
        collected; use `contextlib.aclosing` to cancel them at once. One task at a time may use it.
        """
        plan = self._plan_stream(
            model, version, ordered, max_in_flight, timeout, outputs, parameters, on_error
        )
        return self._stream(plan, aio_stream.complete(requests, plan.defaults))

    async def _stream(
        self, plan: StreamPlan, requests: AsyncGenerator[StreamRequest]
    ) -> AsyncGenerator[Outcome]:
        self._check_open()
        deadline = Deadline.after(plan.timeout)
        # Messages of unanswered requests, for those that are sent again.
        sent: dict[str, pb.ModelInferRequest] = {}

        async def encode(request: StreamRequest) -> pb.ModelInferRequest:
            encoded = await self._encode(plan.model, plan.version, deadline, request)
            if self._retries.possible:
                sent[request.request_id] = encoded
            return encoded

        outcomes = aio_stream.run(
            self._stream_stub.ModelStreamInfer(
                timeout=deadline.for_call(), metadata=with_context(self._metadata + plan.order)
            ),
            requests,
            encode,
            plan.in_flight,
        )
        async with contextlib.aclosing(outcomes):
            async for outcome in outcomes:
                encoded = sent.pop(id_of(outcome), None)
                if isinstance(outcome, InferenceResult):
                    self._retries.answered()
                elif isinstance(outcome, ResourceExhausted) and encoded is not None:
                    outcome = await self._again(outcome, encoded, deadline)
                if isinstance(outcome, InferenceError):
                    self._cache.refused(plan.model, plan.version, outcome)
                    if plan.raises:
                        raise outcome
                yield outcome

    async def metadata(self, model: str, version: str = "", *, timeout: float | None = None) -> ModelMetadata:
        """Return the model's inputs, outputs and versions, cached until the server refuses a request for it."""
        deadline = Deadline.after(timeout)
        arguments.model(model, version)
        return self._cache.get(model, version) or await self._fetch(model, version, deadline)

    async def server_metadata(self, *, timeout: float | None = None) -> ServerMetadata:
        """Return the server's name, version and extensions."""
        answer = await self._call(
            self._stub.ServerMetadata, pb.ServerMetadataRequest(), Deadline.after(timeout)
        )
        return ServerMetadata.from_message(answer)

    async def models(self, *, timeout: float | None = None) -> tuple[ModelStatus, ...]:
        """Return all models of the server's repository, in any state."""
        answer = await self._call(
            self._stub.RepositoryIndex, pb.RepositoryIndexRequest(), Deadline.after(timeout)
        )
        return ModelStatus.from_message(answer)

    async def is_live(self, *, timeout: float | None = None) -> bool:
        """Return whether the server answers; False if it cannot be reached in time."""
        answer = await self._ask(self._stub.ServerLive, pb.ServerLiveRequest(), timeout)
        return answer is not None and bool(answer.live)

    async def is_ready(self, *, timeout: float | None = None) -> bool:
        """Return whether the server is ready; False if it cannot be reached in time."""
        answer = await self._ask(self._stub.ServerReady, pb.ServerReadyRequest(), timeout)
        return answer is not None and bool(answer.ready)

    async def is_model_ready(self, model: str, version: str = "", *, timeout: float | None = None) -> bool:
        """Return whether the model is ready; False if the server cannot be reached in time."""
        arguments.model(model, version)
        answer = await self._ask(
            self._stub.ModelReady, pb.ModelReadyRequest(name=model, version=version), timeout
        )
        return answer is not None and bool(answer.ready)

    async def wait_ready(self, timeout: float | None = None) -> bool:
        """Wait until the server can be reached, then return whether it is ready.

        False if it cannot be reached in time. Use it for a server that is starting: the channel
        connects as soon as the server listens.
        """
        answer = await self._ask(
            self._stub.ServerReady, pb.ServerReadyRequest(), timeout, wait_for_ready=True
        )
        return answer is not None and bool(answer.ready)

    async def _encode(
        self, model: str, version: str, deadline: Deadline, request: StreamRequest
    ) -> pb.ModelInferRequest:
        encoded = self._encode_known(model, version, request)
        if encoded is not None:
            return encoded
        metadata = await self._fetch(model, version, deadline, request.request_id)
        return codec.encode(model, version, request, metadata)

    async def _fetch(
        self, model: str, version: str, deadline: Deadline, request_id: str = ""
    ) -> ModelMetadata:
        request = pb.ModelMetadataRequest(name=model, version=version)
        answer = await self._call(self._stub.ModelMetadata, request, deadline, request_id)
        return self._learned(model, version, answer)

    async def _ask(
        self, method: Callable[..., Any], request: object, timeout: float | None, wait_for_ready: bool = False
    ) -> Any | None:
        try:
            return await self._call(method, request, Deadline.after(timeout), wait_for_ready=wait_for_ready)
        except (Unavailable, DeadlineExceeded):
            return None

    async def _again(
        self, refused: ResourceExhausted, encoded: pb.ModelInferRequest, deadline: Deadline
    ) -> Outcome:
        """Send a refused stream request again as a unary call, and return its outcome."""
        attempts = self._attempts(encoded)
        try:
            await self._wait(refused, None, attempts, deadline)
            answer = await self._call(
                self._stub.ModelInfer, encoded, deadline, refused.request_id, attempts=attempts
            )
            return codec.decode(answer)
        except InferenceError as error:
            return error

    async def _wait(self, error: InferenceError, call: Any, attempts: Attempts, deadline: Deadline) -> None:
        """Wait until the failed request may be sent again; raise the error if it may not."""
        delay = attempts.delay(error, call, deadline.left())
        if delay is None:
            raise error from call
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay):
                await self._closing.wait()
        if self._closed:
            raise errors.closed_during_call(error.request_id) from error

    async def _call(
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
                answer = await method(request, **options)
            except grpc.RpcError as error:
                failure = errors.from_rpc(error, request_id)
                await self._wait(failure, error, attempts, deadline)
            except asyncio.CancelledError:
                if aio_stream.caller_cancelled():
                    raise
                raise errors.closed_during_call(request_id) from None
            else:
                attempts.answered()
                return answer
