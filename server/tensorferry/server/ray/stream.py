"""An open ModelStreamInfer call on an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from tensorferry.server.identity import Metadata
from tensorferry.server.inference.reply import InferenceReply
from tensorferry.server.inference.stream_order import (
    ResponseOrder,
    StreamEntry,
    StreamOptions,
    encode_or_status,
    parse_stream_options,
)
from tensorferry.server.status import Status


class RayStream:
    """Requests of a stream and their responses, in request order or in completion order. For one event loop.

    At most `max_in_flight` requests are read before their responses are taken. Closing the iterator of `responses` cancels
    the requests in flight.
    """

    def __init__(
        self,
        infer: Callable[[bytes, float, Metadata], Awaitable[InferenceReply]],
        status_of: Callable[[BaseException, InferenceReply], Status],
        deadline: float,
        metadata: Metadata,
        *,
        max_in_flight: int,
    ) -> None:
        self._infer = infer
        self._status_of = status_of
        self._deadline = deadline
        self._metadata = metadata
        options = parse_stream_options(metadata)
        # The status if the server ends the stream before the client does.
        self.end: Status | None = options if isinstance(options, Status) else None
        self._options = StreamOptions() if isinstance(options, Status) else options
        self._responses = ResponseOrder(ordered=self._options.ordered)
        self._room = asyncio.Semaphore(max_in_flight)
        self._in_flight = 0
        self._reading = True
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def responses(self, messages: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield the serialised responses until the client ends or cancels the stream, or `end` is set."""
        if self.end is not None:
            return
        self._start(self._read(messages))
        try:
            while (reply := await self._next()) is not None:
                message = encode_or_status(reply, self._options, self._status_of)
                if isinstance(message, Status):
                    self.end = message
                    return
                yield message
                self._in_flight -= 1
                self._room.release()
        finally:
            for task in self._tasks:
                task.cancel()

    async def _next(self) -> InferenceReply | None:
        while True:
            if (reply := self._responses.pop()) is not None:
                return reply
            if self._in_flight == 0 and not self._reading:
                return None
            self._changed.clear()
            await self._changed.wait()

    async def _read(self, messages: AsyncIterator[bytes]) -> None:
        try:
            await self._room.acquire()
            async for data in messages:
                self._in_flight += 1
                self._start(self._serve(data, self._responses.add()))
                await self._room.acquire()
        finally:
            self._reading = False
            self._changed.set()

    async def _serve(self, data: bytes, entry: StreamEntry) -> None:
        self._responses.done(entry, await self._infer(data, self._deadline, self._metadata))
        self._changed.set()

    def _start(self, work: Awaitable[None]) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
