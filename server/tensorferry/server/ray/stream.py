"""An open ModelStreamInfer call on an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from tensorferry.server.identity import Metadata
from tensorferry.server.inference.reply import InferenceReply
from tensorferry.server.inference.responses.stream_responses import (
    StreamOptions,
    encode_or_status,
    parse_stream_options,
)
from tensorferry.server.status import Status
from tensorferry.server.transport.stream_state import StreamEnd, StreamEntry, StreamState


class RayStream:
    """Requests of a stream and their responses, within the limits of `StreamState`. For one event loop.

    Closing the iterator of `responses` cancels the requests in flight.
    """

    def __init__(
        self,
        infer: Callable[[bytes, float, Metadata], Awaitable[InferenceReply]],
        status_of: Callable[[BaseException, InferenceReply], Status],
        deadline: float,
        metadata: Metadata,
        *,
        max_in_flight: int,
        max_bytes: int,
    ) -> None:
        self._infer = infer
        self._status_of = status_of
        self._deadline = deadline
        self._metadata = metadata
        options = parse_stream_options(metadata)
        # The status if the server ends the stream before the client does.
        self.end: Status | None = options if isinstance(options, Status) else None
        self._options = StreamOptions() if isinstance(options, Status) else options
        self._state = StreamState(self._options, max_in_flight, max_bytes)
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def responses(self, messages: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield the serialised responses until the client ends or cancels the stream, or `end` is set."""
        if self.end is not None:
            return
        self._start(self._read(messages))
        try:
            while (entry := await self._next()) is not None:
                assert entry.reply is not None
                message = encode_or_status(entry.reply, self._options, self._status_of)
                if isinstance(message, Status):
                    self.end = message
                    return
                yield message
                self._state.sent()
                self._changed.set()
        finally:
            for task in self._tasks:
                task.cancel()

    async def _next(self) -> StreamEntry | None:
        """Return the next request to answer; None if the stream has ended."""
        while (content := self._state.next_send()) is None:
            await self._change()
        return None if isinstance(content, StreamEnd) else content

    async def _read(self, messages: AsyncIterator[bytes]) -> None:
        try:
            while True:
                while not self._state.may_read:
                    await self._change()
                data = await anext(messages, None)
                if data is None:
                    return
                self._start(self._serve(data, self._state.request_read(len(data))))
        finally:
            self._state.half_close()
            self._changed.set()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def _serve(self, data: bytes, entry: StreamEntry) -> None:
        reply = await self._infer(data, self._deadline, self._metadata)
        self._state.completed(entry, reply, reply.output_bytes)
        self._changed.set()

    def _start(self, work: Awaitable[None]) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
