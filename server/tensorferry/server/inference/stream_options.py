"""One open ModelStreamInfer: what its client may choose, and its errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tensorferry.server.errors import truncate
from tensorferry.server.identity import Metadata
from tensorferry.server.inference.reply import InferenceReply
from tensorferry.server.inference.responses.stream_responses import stream_error, stream_response
from tensorferry.server.status import Status, StatusCode

# The metadata by which a client chooses the order of responses.
STREAM_ORDER = "tensorferry-stream-order"
# Metadata with the value "true": the first error ends the stream with its status. The name is Triton's.
END_ON_ERROR = "triton_grpc_error"

# The code of a call or stream above a limit.
TOO_MANY = StatusCode.RESOURCE_EXHAUSTED

NO_THREAD_FOR_STREAM = Status(
    TOO_MANY,
    "the server cannot start a thread for this stream; try again, or send unary calls, which wait for one",
)

# The status of a stream that a drain ends.
STREAM_SHUTTING_DOWN = Status(StatusCode.UNAVAILABLE, "the server is shutting down; open a stream elsewhere")


class StreamOptions(NamedTuple):
    """A client's choices for its stream: responses in request order, and whether the first error ends it."""

    ordered: bool = True
    end_on_error: bool = False


def parse_stream_options(metadata: Metadata) -> StreamOptions | Status:
    """Return the options in a call's metadata, or INVALID_ARGUMENT for an unknown order."""
    values = dict(metadata)
    order = values.get(STREAM_ORDER, "request")
    if order in ("request", "completion"):
        return StreamOptions(order == "request", end_on_error=values.get(END_ON_ERROR) == "true")
    message = f"metadata {STREAM_ORDER} is {truncate(str(order))!r}; it must be 'request' or 'completion'"
    return Status(StatusCode.INVALID_ARGUMENT, message)


def encode_or_status(
    reply: InferenceReply,
    options: StreamOptions,
    status_of: Callable[[BaseException, InferenceReply], Status],
) -> bytes | Status:
    """Return the serialised ModelStreamInferResponse to send, or the status that ends the stream."""
    try:
        return b"".join(stream_response(reply.pieces(), last=reply.last))
    except BaseException as error:
        # Every exception, SystemExit too, because the client waits for a response.
        status = status_of(error, reply)
    return status if options.end_on_error else stream_error(reply.request_id, reply.addressed, status)


def too_many_streams(limit: int) -> Status:
    """Return the status of a stream above the limit."""
    return Status(
        TOO_MANY,
        f"{limit} streams are open, which is the most this server keeps; close one, or send several requests in one "
        "stream",
    )
