"""Bounded state machine of one ModelStreamInfer, used by every transport: what is read, what is sent next, how it ends."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from tensorferry.server.inference.reply import InferenceCall, InferenceReply
from tensorferry.server.inference.responses.stream_responses import StreamOptions
from tensorferry.server.status import Status, StatusCode

_SHUTTING_DOWN = Status(StatusCode.UNAVAILABLE, "the server is shutting down; open a stream elsewhere")


class StreamEnd(NamedTuple):
    """The end of a stream; the status is None for OK."""

    status: Status | None


class StreamEntry:
    """A response of a stream: the last one to a request, from when the request is read, or an answer before it.

    `call` is set once the service has the request. `unread_bytes` are those counted by `UnreadResponses`. `followed` is
    whether the next response was ready when this one was taken.
    """

    call: InferenceCall | None = None
    reply: InferenceReply | None = None
    unread_bytes = 0
    followed = False


class StreamState:
    """Requests and responses of one stream. Not thread-safe: its owner's lock guards it.

    At most `max_in_flight` requests are between being read and having their last response sent, and fewer large ones:
    their number times the largest message so far stays below `max_bytes`. Then the transport stops reading, and
    HTTP/2's flow control stops the client, so a client that does not read its responses cannot make memory grow.

    One response is sent at a time: `next_send` returns it, `sent` makes room for the next. A model that answers in streams
    bounds its answers itself. They are sent as they come, whatever the order of the other responses.
    """

    def __init__(self, options: StreamOptions, max_in_flight: int, max_bytes: int) -> None:
        self._ordered = options.ordered
        self._max_in_flight = max_in_flight
        self._max_bytes = max_bytes
        # Requests without a last response, in their order; of an ordered stream also those whose turn has not come.
        self._waiting: deque[StreamEntry] = deque()
        # Requests that have had an answer, but no last response.
        self._answered: list[StreamEntry] = []
        # Responses to be sent, in their order.
        self._ready: deque[StreamEntry] = deque()
        # Requests whose last response was not sent.
        self._in_flight = 0
        # Bytes of the largest request or response so far; the next one may be as large.
        self._largest = 0
        self._sending: StreamEntry | None = None
        # Whether no more requests are read.
        self._half_closed = False
        # How the stream ends after its last response; None while it does not end.
        self._end: StreamEnd | None = None
        # The stream has its final status, or the client has left. Nothing more is read or sent.
        self.ended = False

    @property
    def may_read(self) -> bool:
        """Whether the next request may be read now."""
        return (
            self._in_flight < self._max_in_flight
            and self._in_flight * self._largest < self._max_bytes
            and self._end is None
            and not self.ended
        )

    def request_read(self, nbytes: int) -> StreamEntry:
        """Add a request of `nbytes` bytes."""
        self._in_flight += 1
        if nbytes > self._largest:
            self._largest = nbytes
        entry = StreamEntry()
        self._waiting.append(entry)
        return entry

    def half_close(self, status: Status | None = None) -> None:
        """Read no more requests: the stream ends after the last response, with OK unless a status is given."""
        if not self._half_closed:
            self._half_closed = True
            self._end = StreamEnd(status)

    def drain(self) -> None:
        """End the stream with UNAVAILABLE once every request that was read is answered. No more are read."""
        if self._end is None:
            self._end = StreamEnd(_SHUTTING_DOWN)

    def answered(self, entry: StreamEntry, reply: InferenceReply, nbytes: int) -> bool:
        """Add an answer before the last one, of `nbytes` bytes. Return False if nothing more is sent for the request."""
        if self.ended or entry.reply is not None:
            return False
        if entry not in self._answered:
            self._waiting.remove(entry)
            self._answered.append(entry)
            # It may have kept others waiting.
            self._take_turns()
        answer = StreamEntry()
        answer.reply, answer.unread_bytes = reply, nbytes
        self._ready.append(answer)
        return True

    def completed(self, entry: StreamEntry, reply: InferenceReply, nbytes: int) -> None:
        """Record the last reply to a request; its response has `nbytes` bytes."""
        if nbytes > self._largest:
            self._largest = nbytes
        entry.reply = reply
        if entry in self._answered:
            self._answered.remove(entry)
        elif self._ordered and not reply.silent:
            self._take_turns()
            return
        else:
            self._waiting.remove(entry)
        if reply.silent:
            self._in_flight -= 1
            self._take_turns()
        else:
            self._ready.append(entry)

    def _take_turns(self) -> None:
        """Send the responses of an ordered stream whose turn has come."""
        while self._ordered and self._waiting and self._waiting[0].reply is not None:
            self._ready.append(self._waiting.popleft())

    def next_send(self) -> StreamEntry | StreamEnd | None:
        """Return the response to send now, or the stream's end, once; None if there is nothing to send yet."""
        if self._sending is not None or self.ended:
            return None
        if self._ready:
            self._sending = entry = self._ready.popleft()
            entry.followed = bool(self._ready)
            return entry
        if self._in_flight or self._end is None:
            return None
        self.ended = True
        return self._end

    def sent(self) -> None:
        """Record that the response of `next_send` was sent."""
        entry, self._sending = self._sending, None
        if entry is not None and entry.reply is not None and entry.reply.last:
            self._in_flight -= 1

    def end(self) -> list[InferenceCall]:
        """End the stream now; return the calls in flight, to be abandoned outside the owner's lock."""
        self.ended = True
        in_flight = (*self._ready, *self._waiting, *self._answered)
        return [entry.call for entry in in_flight if entry.call is not None]
