"""Inference of the asyncio client: unary calls, streams and retries."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Mapping
from typing import Any, Literal, overload

import grpc

from tensorferry.client import errors
from tensorferry.client.aio import stream, waits
from tensorferry.client.aio.sequence import InferenceSequence
from tensorferry.client.aio.shared_memory import SharedMemoryCalls
from tensorferry.client.connection.channel import COMPLETION_ORDER
from tensorferry.client.connection.context import (
    CallContext,
    CallSettings,
    Compression,
    Headers,
    seconds_of,
)
from tensorferry.client.connection.endpoints import Connection
from tensorferry.client.connection.retry import Attempts, is_repeatable
from tensorferry.client.errors import InferenceError, InvalidInput, ResourceExhausted
from tensorferry.client.inflight import InFlight, Outcome
from tensorferry.client.messages import arguments, chunks, codec, rpcs
from tensorferry.client.messages.codec import Inputs, Outputs, StreamDefaults, StreamRequest
from tensorferry.client.messages.results import InferenceResult, Parameter
from tensorferry.protos import inference_pb2 as pb


class InferenceCalls(SharedMemoryCalls):
    """Inference over unary calls and streams, with retries."""

    async def infer(
        self,
        model: str,
        inputs: Inputs,
        *,
        version: str = "",
        timeout: float | None = None,
        outputs: Outputs | None = None,
        request_id: str | None = None,
        parameters: Mapping[str, Parameter] | None = None,
        metadata: Headers = (),
        compression: Compression | None = None,
    ) -> InferenceResult:
        """Run one request and wait for its answer.

        `inputs` maps each input name to its array. Lists and Python scalars become arrays of the
        model's datatype if that loses nothing; arrays are never cast. A pandas DataFrame, a pyarrow
        table or a dict of lists gives columns. A `version` of "" lets the server choose. `outputs`
        names the requested outputs, None for all; as a dict, a `Classification` asks for the classes
        of an output. `metadata` is added to the client's, and `compression` replaces the client's,
        for this call.

        A request above the limits that the server states is sent in several parts, one after the
        other, and their results are joined. All have the same deadline.

        Raises InvalidInput before anything is sent if inputs or outputs do not fit the model.

        >>> result = await client.infer("digits", {"image": np.zeros((2, 8, 8), np.uint8)}, timeout=1.0)
        >>> result["probabilities"].shape
        (2, 10)
        """
        request = codec.request_of(inputs, request_id, outputs, parameters)
        context = self._settings.of_call(metadata, compression).begin(timeout, request.request_id)
        encoded = await self._encode(model, version, context, request)
        results: list[InferenceResult] = []
        try:
            for part in self._parts(model, version, request, encoded):
                result = codec.decode(await self._call("ModelInfer", part, context))
                results.append(await self._compared(part, context, result))
        except InferenceError as error:
            self._cache.refused(model, version, error)
            raise
        return chunks.join(results)

    @overload
    def stream(
        self,
        model: str,
        requests: AsyncIterable[Inputs | StreamRequest] | Iterable[Inputs | StreamRequest],
        *,
        version: str = ...,
        ordered: bool = ...,
        max_in_flight: int = ...,
        timeout: float | None = ...,
        outputs: Outputs | None = ...,
        parameters: Mapping[str, Parameter] | None = ...,
        metadata: Headers = ...,
        compression: Compression | None = ...,
        on_error: Literal["raise"] = ...,
    ) -> AsyncGenerator[InferenceResult]: ...

    @overload
    def stream(
        self,
        model: str,
        requests: AsyncIterable[Inputs | StreamRequest] | Iterable[Inputs | StreamRequest],
        *,
        version: str = ...,
        ordered: bool = ...,
        max_in_flight: int = ...,
        timeout: float | None = ...,
        outputs: Outputs | None = ...,
        parameters: Mapping[str, Parameter] | None = ...,
        metadata: Headers = ...,
        compression: Compression | None = ...,
        on_error: Literal["yield"],
    ) -> AsyncGenerator[InferenceResult | InferenceError]: ...

    def stream(
        self,
        model: str,
        requests: AsyncIterable[Inputs | StreamRequest] | Iterable[Inputs | StreamRequest],
        *,
        version: str = "",
        ordered: bool = False,
        max_in_flight: int = 64,
        timeout: float | None = None,
        outputs: Outputs | None = None,
        parameters: Mapping[str, Parameter] | None = None,
        metadata: Headers = (),
        compression: Compression | None = None,
        on_error: Literal["raise", "yield"] = "raise",
    ) -> AsyncGenerator[InferenceResult | InferenceError]:
        """Run many requests over one call and yield each result when it arrives.

        `requests` yields dicts as for `infer`, or `StreamRequest` objects with their own id,
        outputs or parameters. Each result has the `id` of its request; a missing id is
        generated. Results come in order of completion, or in request order if `ordered` is true.
        A model that answers in streams gives a request any number of results, as they come.
        `timeout` covers the whole stream.

        At most `max_in_flight` requests have been taken from `requests` without their result
        being yielded, so a slow consumer slows `requests` down. An exception of `requests` is
        raised here, after the results of all requests sent before it.

        `requests` is a plain or an asynchronous iterable, and is iterated in a separate task.

        A failed request raises its InferenceError, with `request_id`, and ends the stream. With
        `on_error="yield"` the error is yielded in place of the result, and the stream continues.
        If the call itself breaks, every request in flight fails with the error of the call. With
        "yield" that error is raised last, for the requests that were never sent.

        Nothing is sent before the first `anext()`. `aclose()` cancels the call and all its
        requests. Leaving an `async for` early cancels them only when the iterator is garbage
        collected; use `contextlib.aclosing` to cancel them at once. One task at a time may use it.

        >>> requests = ({"image": np.full((1, 8, 8), n, np.uint8)} for n in range(3))
        >>> [result["probabilities"].shape async for result in client.stream("digits", requests)]
        [(1, 10), (1, 10), (1, 10)]
        """
        arguments.model(model, version)
        if on_error not in ("raise", "yield"):
            change = "'raise' ends the stream, 'yield' goes on"
            raise InvalidInput("on_error", "'raise' or 'yield'", arguments.shown(on_error), change)
        return self._stream(
            model,
            version,
            self._settings.of_call(metadata, compression),
            seconds_of(timeout),
            InFlight(max_in_flight, ordered=ordered),
            stream.complete(requests, StreamDefaults(outputs, parameters)),
            raises=on_error == "raise",
        )

    def sequence(
        self,
        model: str,
        *,
        version: str = "",
        timeout: float | None = None,
        metadata: Headers = (),
        compression: Compression | None = None,
    ) -> InferenceSequence:
        """Begin a sequence of requests to a model that keeps state between them. Use it as a context manager.

        Its requests go over a stream of their own, so that they reach one process of a server. `timeout`
        covers the whole sequence.

        >>> async with client.sequence("digits") as sequence:
        ...     result = await sequence.infer({"image": np.zeros((1, 8, 8), np.uint8)})
        >>> result["probabilities"].shape
        (1, 10)
        """
        return InferenceSequence(
            lambda requests: self.stream(
                model,
                requests,
                version=version,
                ordered=True,
                max_in_flight=1,
                timeout=timeout,
                metadata=metadata,
                compression=compression,
            )
        )

    async def _stream(
        self,
        model: str,
        version: str,
        settings: CallSettings,
        timeout: float | None,
        in_flight: InFlight,
        requests: AsyncGenerator[StreamRequest],
        *,
        raises: bool,
    ) -> AsyncGenerator[Outcome]:
        context = settings.begin(timeout)
        connection = await self._stream_connection(context)
        self._check_open()

        async def encode(request: StreamRequest) -> pb.ModelInferRequest:
            of_request = context.of_request(request.request_id)
            return await self._encode(model, version, of_request, request)

        method = connection.stream_stub.ModelStreamInfer
        order = () if in_flight.ordered else COMPLETION_ORDER
        call = functools.partial(self._begin, method, **context.options(order))
        outcomes = stream.run(call, requests, encode, in_flight)
        async with contextlib.aclosing(outcomes):
            async for outcome, request in outcomes:
                if request is not None:
                    outcome = await self._settled(request, context, outcome)
                if isinstance(outcome, InferenceError):
                    self._cache.refused(model, version, outcome)
                    if raises:
                        try:
                            raise outcome
                        finally:
                            # As in `_call`.
                            del outcome
                yield outcome

    async def _stream_connection(self, context: CallContext) -> Connection:
        """Return the connection of the next stream: of several endpoints, to one that answers a call."""
        rpc = rpcs.SERVER_LIVE
        attempts = self._attempts(rpc.message)
        if len(self._endpoints) > 1:
            await self._call(rpc.method, rpc.message, context, attempts=attempts)
        return attempts.connection or attempts.next()

    async def _encode(
        self, model: str, version: str, context: CallContext, request: StreamRequest
    ) -> pb.ModelInferRequest:
        encoded = self._encode_known(model, version, request)
        if encoded is not None:
            return encoded
        return codec.encode(model, version, request, await self._fetch(model, version, context))

    async def _settled(
        self, request: pb.ModelInferRequest, context: CallContext, outcome: Outcome
    ) -> Outcome:
        """Return the last outcome of a stream's request. A refused request is sent again, as a unary call."""
        try:
            if isinstance(outcome, ResourceExhausted) and is_repeatable(request):
                attempts = self._attempts(request)
                context = context.of_request(request.id)
                if not await self._waited(outcome, None, attempts, context):
                    return outcome
                outcome = codec.decode(await self._call("ModelInfer", request, context, attempts=attempts))
            elif isinstance(outcome, InferenceResult):
                self._retries.answered()
            else:
                return outcome
            return await self._compared(request, context, outcome)
        except InferenceError as error:
            return error

    async def _waited(
        self, error: InferenceError, call: Any, attempts: Attempts, context: CallContext
    ) -> bool:
        """Wait until the failed request may be sent again; return whether it may."""
        delay = attempts.delay(error, call, context.deadline.left())
        if delay is None:
            return False
        if await self._closing.wait(delay):
            raise errors.closed_during_call(error.request_id) from error
        return True

    async def _call(
        self,
        method: str,
        request: object,
        context: CallContext,
        *,
        attempts: Attempts | None = None,
    ) -> Any:
        attempts = attempts or self._attempts(request)
        while True:
            options = self._call_options(context)
            call = getattr(attempts.next().stub, method)
            try:
                answer = await self._begin(call, request, **options)
            except grpc.RpcError as error:
                failure = errors.from_rpc(error, context.request_id)
                if not await self._waited(failure, error, attempts, context):
                    try:
                        raise failure from error
                    finally:
                        # Its traceback refers to this frame, which would keep the request in memory.
                        del failure
            except asyncio.CancelledError:  # asyncio only
                if waits.caller_cancelled():
                    raise
                raise errors.closed_during_call(context.request_id) from None
            else:
                attempts.answered()
                return answer
