"""Bounded state machine of one ModelStreamInfer, used by every transport: what is read, what is sent next, how it ends."""

from __future__ import annotations

from typing import NamedTuple

from tensorferry.server.inference.reply import InferenceCall, InferenceReply
from tensorferry.server.inference.stream_order import (
    STREAM_SHUTTING_DOWN,
    ResponseOrder,
    StreamEntry,
    StreamOptions,
)
from tensorferry.server.status import Status


class StreamEnd(NamedTuple):
    """The end of a stream; the status is None for OK."""

    status: Status | None


class StreamState:
    """Requests and responses of one stream. Not thread-safe: its owner's lock guards it.

    At most `max_in_flight` requests are between being read and having their response sent, and fewer large ones:
    their number times the largest message so far stays below `max_bytes`. Then the transport stops reading, and
    HTTP/2's flow control stops the client, so a client that does not read its responses cannot make memory grow.

    One response is sent at a time: `next_send` returns it, `sent` makes room for the next.
    """

    def __init__(self, options: StreamOptions, max_in_flight: int, max_bytes: int) -> None:
        self.options = options
        self._max_in_flight = max_in_flight
        self._max_bytes = max_bytes
        self._order = ResponseOrder(ordered=options.ordered)
        self._in_flight = 0
        # Bytes of the largest request or response so far; the next one may be as large.
        self._largest = 0
        self._sending = False
        # Whether the client has sent its last request.
        self._half_closed = False
        self._draining = False
        # Why nothing more is read although the client may send more.
        self._refusal: Status | None = None
        # The stream has its final status, or the client has left. Nothing more is read or sent.
        self.ended = False

    @property
    def may_read(self) -> bool:
        """Whether the next request may be read now."""
        return (
            not (self.ended or self._half_closed or self._refusal)
            and self._in_flight < self._max_in_flight
            and self._in_flight * self._largest < self._max_bytes
        )

    def request_read(self, nbytes: int) -> StreamEntry:
        """Add a request of `nbytes` bytes."""
        self._in_flight += 1
        self._largest = max(self._largest, nbytes)
        return self._order.add()

    def half_close(self) -> None:
        """Record that the client sends no more requests: the stream ends with OK after the last response."""
        self._half_closed = True

    def refuse(self, status: Status) -> None:
        """Read no more requests: the stream ends with this status after the last response."""
        self._refusal = status

    def drain(self) -> None:
        """End the stream with UNAVAILABLE once every request that was read is answered."""
        self._draining = True

    def completed(self, entry: StreamEntry, reply: InferenceReply, nbytes: int) -> None:
        """Record the reply to a request; its response has `nbytes` bytes."""
        self._largest = max(self._largest, nbytes)
        self._order.done(entry, reply)

    def next_send(self) -> InferenceReply | StreamEnd | None:
        """Return the response to send now, or the stream's end, once; None if there is nothing to send yet."""
        if self._sending or self.ended:
            return None
        reply = self._order.pop()
        if reply is not None:
            self._sending = True
            return reply
        if self._in_flight or not (self._half_closed or self._draining or self._refusal):
            return None
        self.ended = True
        return StreamEnd(self._refusal or (None if self._half_closed else STREAM_SHUTTING_DOWN))

    def sent(self) -> None:
        """Record that the response of `next_send` was sent."""
        self._sending = False
        self._in_flight -= 1

    def end(self) -> list[InferenceCall]:
        """End the stream now; return the calls in flight, to be abandoned outside the owner's lock."""
        self.ended = True
        return self._order.calls()
