"""One open ModelStreamInfer: the order of its responses, and how the threaded servicer serves it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import grpc

from tensorferry.server.errors import truncate
from tensorferry.server.identity import Metadata
from tensorferry.server.inference.reply import InferenceCall, InferenceReply
from tensorferry.server.inference.responses import stream_error
from tensorferry.server.status import Status

_log = logging.getLogger("tensorferry.server")

# The name in a call's metadata by which it chooses the order of its responses.
STREAM_ORDER = "tensorferry-stream-order"
# With the value "true": the first error ends the stream with its status. The name is Triton's.
END_ON_ERROR = "triton_grpc_error"

# What a call is told amid which something unforeseen happened.
INTERNAL_ERROR = Status(grpc.StatusCode.INTERNAL, "internal error; the server's log has the details")

# The code of calls and streams that are one too many.
TOO_MANY = grpc.StatusCode.RESOURCE_EXHAUSTED

# What a stream is told for which the system gives no thread.
NO_THREAD_FOR_STREAM = Status(
    TOO_MANY,
    "the server cannot start a thread for this stream; try again, or send unary calls, which wait for one",
)

# What a stream is told that a drain ends.
STREAM_SHUTTING_DOWN = Status(
    grpc.StatusCode.UNAVAILABLE, "the server is shutting down; open a stream elsewhere"
)


class StreamOptions(NamedTuple):
    """What a call wants of its stream: responses in request order, and the first error to be its end."""

    ordered: bool = True
    end_on_error: bool = False


def parse_stream_options(metadata: Metadata) -> StreamOptions | Status:
    """What a call's metadata asks for; or the status where it is no order that there is."""
    given = dict(metadata)
    order = given.get(STREAM_ORDER, "request")
    if order in ("request", "completion"):
        return StreamOptions(order == "request", end_on_error=given.get(END_ON_ERROR) == "true")
    message = f"metadata {STREAM_ORDER} is {truncate(str(order))!r}; it must be 'request' or 'completion'"
    return Status(grpc.StatusCode.INVALID_ARGUMENT, message)


def encode_or_status(
    reply: InferenceReply,
    options: StreamOptions,
    status_of: Callable[[BaseException, InferenceReply], Status],
) -> bytes | Status:
    """The serialised ModelStreamInferResponse to send; or the status with which the stream ends."""
    try:
        return reply.stream_message()
    except BaseException as error:
        # SystemExit, too, would be lost on the way, and the response with it.
        status = status_of(error, reply)
    return status if options.end_on_error else stream_error(reply.request_id, reply.addressed, status)


def too_many_streams(most: int) -> Status:
    """What a stream is told that is one too many."""
    return Status(
        TOO_MANY,
        f"{most} streams are open, which is the most this server keeps; close one, or send several requests in one "
        "stream",
    )


class StreamEntry:
    """A request's place in a stream, until its response is sent."""

    __slots__ = ("call", "reply")

    def __init__(self) -> None:
        self.call: InferenceCall | None = None
        self.reply: InferenceReply | None = None


class ResponseOrder:
    """Which response of a stream may be sent next. Not thread-safe: its owner's lock guards it."""

    def __init__(self, *, ordered: bool) -> None:
        self._ordered = ordered
        self._entries: deque[StreamEntry] = deque()  # in request order, those whose response is not yet taken
        self._done: deque[StreamEntry] = deque()  # in the order of completion, likewise; only if not ordered

    def add(self) -> StreamEntry:
        """A place for the request that was read last."""
        entry = StreamEntry()
        self._entries.append(entry)
        return entry

    def done(self, entry: StreamEntry, reply: InferenceReply) -> None:
        """The request has its reply."""
        entry.reply = reply
        if not self._ordered:
            self._entries.remove(entry)
            self._done.append(entry)

    def pop(self) -> InferenceReply | None:
        """Takes the next response that may be sent; None when there is none now."""
        if not self._ordered:
            return self._done.popleft().reply if self._done else None
        entries = self._entries
        return entries.popleft().reply if entries and entries[0].reply is not None else None

    def calls(self) -> list[InferenceCall]:
        """The calls that were not answered yet, or whose response was not taken."""
        return [entry.call for entry in (*self._entries, *self._done) if entry.call is not None]
