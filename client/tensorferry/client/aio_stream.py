"""The stream of the asyncio client: one call, several requests in flight.

A task of its own pulls and sends the requests; the consumer reads the answers. The consumer
reads only while an answer is due, so a request that fails before it is sent reaches the
consumer after at most one answer, never after the next input.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
)
from typing import Any, TypeAlias

import grpc

from tensorferry.client import errors
from tensorferry.client.errors import InferenceError
from tensorferry.client.inflight import InFlight, Outcome, unanswered
from tensorferry.client.messages import tensors
from tensorferry.client.messages.tensors import StreamDefaults, StreamRequest
from tensorferry.protos import inference_pb2 as pb

Requests = (
    AsyncIterable[Mapping[str, object] | StreamRequest] | Iterable[Mapping[str, object] | StreamRequest]
)
Encode = Callable[[StreamRequest], Awaitable[pb.ModelInferRequest]]
Call: TypeAlias = "grpc.aio.StreamStreamCall[pb.ModelInferRequest, pb.ModelStreamInferResponse]"

# What writing to a call raises that has ended; its reader learns why.
_CALL_ENDED = contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError)

# How long the server's status may lag behind a message that could not be sent.
_STATUS_SECONDS = 1.0
_NOT_SENT = "Internal error from Core"


class _Ending:
    """The status that the server ended the call with.

    When a message can no longer be sent because the server ended the call, grpcio overwrites
    the call's status with an INTERNAL of its own, shortly before or after the server's arrives.
    Each of the two runs the call's done callbacks, where the server's is kept.
    """

    def __init__(self, call: Call) -> None:
        self._status: asyncio.Future[tuple[grpc.StatusCode, str, Any]]
        self._status = asyncio.get_running_loop().create_future()
        call.add_done_callback(self._changed)

    def _changed(self, call: Any) -> None:
        details = _finished(call.details())
        if details != _NOT_SENT and not self._status.done():
            self._status.set_result((_finished(call.code()), details, _finished(call.trailing_metadata())))

    async def error(self, raised: grpc.RpcError) -> InferenceError | None:
        """The server's error in place of grpcio's; None when the server saw none."""
        error = errors.from_rpc(raised)
        if error.message != _NOT_SENT:
            return error
        try:
            async with asyncio.timeout(_STATUS_SECONDS):
                code, details, trailers = await self._status
        except TimeoutError:
            return error
        return None if code is grpc.StatusCode.OK else errors.from_status(code, details, trailers)


def _finished(coroutine: Coroutine[Any, Any, Any]) -> Any:
    # A call that is done answers at once; awaiting it in a task would read a later status.
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    raise RuntimeError("a call that is done has no status")


class _Feed:
    """Sends the requests while there is room for them; its task owns the call's sending side."""

    def __init__(
        self, call: Call, requests: AsyncIterator[StreamRequest], encode: Encode, in_flight: InFlight
    ) -> None:
        self._call = call
        self._requests = requests
        self._encode = encode
        self._in_flight = in_flight
        self._over = False
        self._failure: Exception | None = None
        self._room_or_over = asyncio.Event()
        self._due_or_over = asyncio.Event()
        call.add_done_callback(lambda _: self._stop())
        self._task = asyncio.create_task(self._send_all(), name="tensorferry-stream-feed")

    async def _send_all(self) -> None:
        try:
            while await self._room():
                request = await anext(self._requests, None)
                if request is None:
                    break
                await self._send(request)
        except Exception as error:
            # Raised by the caller's iterable: it belongs to the consumer, who gets it once what
            # was sent is answered.
            self._failure = error
        self._stop()
        with _CALL_ENDED:
            await self._call.done_writing()

    async def _room(self) -> bool:
        while not (self._over or self._in_flight.has_room()):
            self._room_or_over.clear()
            await self._room_or_over.wait()
        return not self._over

    async def _send(self, request: StreamRequest) -> None:
        self._in_flight.check_new(request.request_id)
        try:
            sent = await self._encode(request)
        except InferenceError as error:
            self._in_flight.add(request.request_id)
            self._in_flight.settle(request.request_id, error)
            self._due_or_over.set()
        else:
            self._in_flight.add(request.request_id)
            self._due_or_over.set()
            with _CALL_ENDED:
                await self._call.write(sent)

    def _stop(self) -> None:
        self._over = True
        self._room_or_over.set()
        self._due_or_over.set()

    async def take(self) -> Outcome | None:
        """The next outcome; None when the consumer should read an answer, or the call's end."""
        while True:
            outcome = self._in_flight.take()
            if outcome is not None:
                self._room_or_over.set()
                return outcome
            if self._over or self._in_flight.awaited:
                return None
            self._due_or_over.clear()
            await self._due_or_over.wait()

    def abandon(self, broken: InferenceError | None) -> tuple[list[Outcome], Exception | None]:
        """The call ended: the outcomes that were not taken, and what is to be raised after them."""
        if broken is None and self._in_flight.awaited:
            broken = unanswered(self._in_flight.awaited)
        outcomes = self._in_flight.abandon(broken) if broken else []
        return outcomes, self._failure or broken

    async def close(self) -> None:
        """Cancels the call and ends the task, wherever it waits."""
        self._call.cancel()
        self._task.cancel()
        await asyncio.wait([self._task])


def caller_cancelled() -> bool:
    """Whether a CancelledError is the caller's wish; else grpcio raised it for a call that it closed."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def complete(requests: Requests, defaults: StreamDefaults) -> AsyncGenerator[StreamRequest]:
    """The requests of an iterable, asynchronous or not, with their defaults."""
    if isinstance(requests, AsyncIterable):
        return _complete(requests, defaults)
    return _complete_plain(tensors.iterated(requests), defaults)


async def _complete(
    requests: AsyncIterable[Mapping[str, object] | StreamRequest], defaults: StreamDefaults
) -> AsyncGenerator[StreamRequest]:
    async for request in requests:
        yield defaults.complete(request)


async def _complete_plain(
    requests: Iterator[Mapping[str, object] | StreamRequest], defaults: StreamDefaults
) -> AsyncGenerator[StreamRequest]:
    for request in requests:
        yield defaults.complete(request)


async def run(
    call: Call, requests: AsyncGenerator[StreamRequest], encode: Encode, in_flight: InFlight
) -> AsyncGenerator[Outcome]:
    """The outcomes of the requests, until all are answered.

    Raises what `requests` raised, once all that was sent is answered; InferenceError when the
    call ends early, after every request in flight has got it as its outcome. Closing the
    iterator cancels the call and the task that sends.
    """
    ending = _Ending(call)
    feed = _Feed(call, requests, encode, in_flight)
    answers = aiter(call)
    broken: InferenceError | None = None
    try:
        while True:
            outcome = await feed.take()
            if outcome is not None:
                yield outcome
                continue
            try:
                # Not call.read(), which drops the answers that are left once the call has ended.
                answer = await anext(answers, None)
            except grpc.RpcError as error:
                broken = await ending.error(error)
                break
            except asyncio.CancelledError:
                if caller_cancelled():
                    raise
                broken = errors.closed()
                break
            if answer is None:
                break
            in_flight.settle(answer.infer_response.id, tensors.decode_stream(answer))
        outcomes, failure = feed.abandon(broken)
        for outcome in outcomes:
            yield outcome
        if failure is not None:
            raise failure
    finally:
        await feed.close()
        await requests.aclose()
