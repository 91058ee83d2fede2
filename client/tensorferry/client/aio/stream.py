"""Stream of the asyncio client: one call, several requests in flight.

A separate task takes and sends the requests; the consumer reads the answers. It reads only
while an answer is due. So the error of a request that cannot be sent reaches the consumer
after at most one answer, and never waits for the next input.
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
)
from typing import Any, TypeAlias

import grpc

from tensorferry.client import errors
from tensorferry.client.aio import waits
from tensorferry.client.errors import InferenceError
from tensorferry.client.inflight import InFlight, Taken
from tensorferry.client.messages import codec
from tensorferry.client.messages.codec import Inputs, StreamDefaults, StreamRequest
from tensorferry.protos import inference_pb2 as pb

Requests = AsyncIterable[Inputs | StreamRequest] | Iterable[Inputs | StreamRequest]
Encode = Callable[[StreamRequest], Awaitable[pb.ModelInferRequest]]
Call: TypeAlias = "grpc.aio.StreamStreamCall[pb.ModelInferRequest, pb.ModelStreamInferResponse]"

# Exceptions of a write to a call that has ended; the reader gets the reason.
_CALL_ENDED = contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError)

# Longest wait for the server's status after a failed write.
_STATUS_SECONDS = 1.0
_NOT_SENT = "Internal error from Core"


class _FinalStatus:
    """Status with which the server ended the call.

    If a write fails because the server ended the call, grpcio overwrites the call's status with
    its own INTERNAL, shortly before or after the server's status arrives. Each of the two runs
    the call's done callbacks; the callback keeps the server's.
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
        """Return the server's error in place of grpcio's; None if the server's status is OK."""
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
    # A finished call returns at once; awaiting it in a task could read a later status.
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    raise RuntimeError("a finished call has no status")


class _RequestFeed:
    """Task that sends the requests while there is room; it owns the sending side of the call."""

    def __init__(
        self, call: Call, requests: AsyncIterator[StreamRequest], encode: Encode, in_flight: InFlight
    ) -> None:
        self._call = call
        self._requests = requests
        self._encode = encode
        self._in_flight = in_flight
        self._over = False
        self._all_sent = False
        self._failure: BaseException | None = None
        self._room_or_over = asyncio.Event()
        self._due_or_over = asyncio.Event()
        call.add_done_callback(lambda _: self._stop())
        self._task = asyncio.create_task(self._send_all(), name="tensorferry-stream-feed")

    async def _send_all(self) -> None:
        try:
            while await self._room():
                request = await self._next()
                if request is None:
                    self._all_sent = True
                    break
                await self._send(request)
        except Exception as error:
            # The caller's iterable raised it. It is raised in the consumer once all sent
            # requests are answered.
            self._failure = error
        self._stop()
        with _CALL_ENDED:
            await self._call.done_writing()

    async def _next(self) -> StreamRequest | None:
        try:
            return await anext(self._requests, None)
        except BaseException as error:
            if waits.caller_cancelled():
                raise
            # The caller's iterable raised it, or awaited something that was cancelled.
            self._failure = error
            return None

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
            self._in_flight.add(request.request_id, sent)
            self._due_or_over.set()
            with _CALL_ENDED:
                await self._call.write(sent)

    def _stop(self) -> None:
        self._over = True
        self._room_or_over.set()
        self._due_or_over.set()

    async def take(self) -> Taken | None:
        """Return the next outcome, or None if the consumer must read an answer or the call's end."""
        while True:
            taken = self._in_flight.take()
            if taken is not None:
                self._room_or_over.set()
                return taken
            if self._over or self._in_flight.awaited:
                return None
            self._due_or_over.clear()
            await self._due_or_over.wait()

    def answered(self) -> None:
        """Let the next request be sent if an answer has made room for it."""
        self._room_or_over.set()

    def abandon(self, broken: InferenceError | None) -> tuple[list[Taken], BaseException | None]:
        """End the stream: return the outcomes not yet taken, and the exception to raise after them."""
        left, broken = self._in_flight.end(broken, all_sent=self._all_sent)
        return left, self._failure or broken

    async def close(self) -> None:
        """Cancel the call and the task."""
        self._call.cancel()
        self._task.cancel()
        await asyncio.wait([self._task])
        # The exception that ended the task refers to this object.
        del self._task


def complete(requests: Requests, defaults: StreamDefaults) -> AsyncGenerator[StreamRequest]:
    """Yield the requests of a plain or asynchronous iterable, with defaults filled in."""
    return _complete(requests if isinstance(requests, AsyncIterable) else codec.iterated(requests), defaults)


async def _complete(requests: Requests, defaults: StreamDefaults) -> AsyncGenerator[StreamRequest]:
    if isinstance(requests, AsyncIterable):
        async for request in requests:
            yield defaults.complete(request)
    else:
        for request in requests:
            yield defaults.complete(request)


async def run(
    open_call: Callable[[], Call],
    requests: AsyncGenerator[StreamRequest],
    encode: Encode,
    in_flight: InFlight,
) -> AsyncGenerator[Taken]:
    """Yield the outcomes of the requests, each with its message, until all are answered.

    An exception of `requests` is raised once all sent requests are answered. If the call ends
    early, every request in flight gets its InferenceError as outcome, and then it is raised.
    Closing the iterator cancels the call and the task that sends.
    """
    call = open_call()
    ending = _FinalStatus(call)
    feed = _RequestFeed(call, requests, encode, in_flight)
    answers = aiter(call)
    broken: InferenceError | None = None
    try:
        while True:
            taken = await feed.take()
            if taken is not None:
                yield taken
                continue
            try:
                # Not call.read(): it drops the remaining answers once the call has ended.
                answer = await anext(answers, None)
            except grpc.RpcError as error:
                broken = await ending.error(error)
                break
            except asyncio.CancelledError:
                if waits.caller_cancelled():
                    raise
                broken = errors.closed_during_call()
                break
            if answer is None:
                break
            in_flight.answer(answer)
            feed.answered()
        left, failure = feed.abandon(broken)
        for taken in left:
            yield taken
        if failure is not None:
            raise failure
    finally:
        await feed.close()
        await requests.aclose()
