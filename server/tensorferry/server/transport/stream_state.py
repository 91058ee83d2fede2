"""Bounded state machine of one ModelStreamInfer, used by every transport: what is read, what is sent next, how it ends."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from tensorferry.server.inference.reply import InferenceCall, InferenceReply
from tensorferry.server.inference.stream_options import STREAM_SHUTTING_DOWN, StreamOptions
from tensorferry.server.status import Status


class StreamEnd(NamedTuple):
    """The end of a stream; the status is None for OK."""

    status: Status | None


class StreamEntry:
    """A request of a stream until its response is sent.

    `call` is set once the service has the request. `unread_bytes` are those counted by `UnreadResponses`. `followed` is
    whether the next response was ready when this one was taken.
    """

    call: InferenceCall | None = None
    reply: InferenceReply | None = None
    unread_bytes = 0
    followed = False


class StreamState:
    """Requests and responses of one stream. Not thread-safe: its owner's lock guards it.

    At most `max_in_flight` requests are between being read and having their response sent, and fewer large ones:
    their number times the largest message so far stays below `max_bytes`. Then the transport stops reading, and
    HTTP/2's flow control stops the client, so a client that does not read its responses cannot make memory grow.

    One response is sent at a time: `next_send` returns it, `sent` makes room for the next.
    """

    def __init__(self, options: StreamOptions, max_in_flight: int, max_bytes: int) -> None:
        self._ordered = options.ordered
        self._max_in_flight = max_in_flight
        self._max_bytes = max_bytes
        # Requests whose response was not taken by `next_send`, in the order of their responses.
        self._entries: deque[StreamEntry] = deque()
        # How many of them have a reply.
        self._completed = 0
        # Those, and the one whose response is being sent.
        self._in_flight = 0
        # Bytes of the largest request or response so far; the next one may be as large.
        self._largest = 0
        self._sending = False
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
            and not (self.ended or self._half_closed)
        )

    def request_read(self, nbytes: int) -> StreamEntry:
        """Add a request of `nbytes` bytes."""
        self._in_flight += 1
        if nbytes > self._largest:
            self._largest = nbytes
        entry = StreamEntry()
        self._entries.append(entry)
        return entry

    def half_close(self, status: Status | None = None) -> None:
        """Read no more requests: the stream ends after the last response, with OK unless a status is given."""
        if not self._half_closed:
            self._half_closed = True
            self._end = StreamEnd(status)

    def drain(self) -> None:
        """End the stream with UNAVAILABLE once every request that was read is answered."""
        if self._end is None:
            self._end = StreamEnd(STREAM_SHUTTING_DOWN)

    def completed(self, entry: StreamEntry, reply: InferenceReply, nbytes: int) -> None:
        """Record the reply to a request; its response has `nbytes` bytes."""
        if nbytes > self._largest:
            self._largest = nbytes
        entry.reply = reply
        if not self._ordered:
            # The response is the next after those of the requests that have a reply.
            self._entries.remove(entry)
            self._entries.insert(self._completed, entry)
        self._completed += 1

    def next_send(self) -> StreamEntry | StreamEnd | None:
        """Return the request to answer now, or the stream's end, once; None if there is nothing to send yet."""
        if self._sending or self.ended:
            return None
        if self._entries and self._entries[0].reply is not None:
            self._sending = True
            self._completed -= 1
            entry = self._entries.popleft()
            entry.followed = bool(self._entries) and self._entries[0].reply is not None
            return entry
        if self._in_flight or self._end is None:
            return None
        self.ended = True
        return self._end

    def sent(self) -> None:
        """Record that the response of `next_send` was sent."""
        self._sending = False
        self._in_flight -= 1

    def end(self) -> list[InferenceCall]:
        """End the stream now; return the calls in flight, to be abandoned outside the owner's lock."""
        self.ended = True
        return [entry.call for entry in self._entries if entry.call is not None]
