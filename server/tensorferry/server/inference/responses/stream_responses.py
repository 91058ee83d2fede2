"""One open ModelStreamInfer: what its client may choose, its own errors, and its messages.

A message is an answer to a request, of which the last is marked, or a request's error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.errors import truncate
from tensorferry.server.identity import Metadata
from tensorferry.server.inference.reply import InferenceReply, Piece
from tensorferry.server.status import Status, StatusCode
from tensorferry.server.wire.fields import encode_varint

# The metadata by which a client chooses the order of responses.
STREAM_ORDER = "tensorferry-stream-order"
# Metadata with the value "true": the first error ends the stream with its status. The name is Triton's.
END_ON_ERROR = "triton_grpc_error"

# Parameters with the gRPC code of an error inside a stream and its retry hint. The message has no fields for them.
STATUS_PARAMETER = "tensorferry_status"
RETRY_PARAMETER = "tensorferry_retry_after_ms"

_RESPONSE_TAG = pb.ModelStreamInferResponse.DESCRIPTOR.fields_by_name["infer_response"].number << 3 | 2

# Triton's mark of the last response to a request.
FINAL_PARAMETER = "triton_final_response"
_NOT_FINAL, _FINAL = (
    pb.ModelInferResponse(
        parameters={FINAL_PARAMETER: pb.InferParameter(bool_param=final)}
    ).SerializeToString()
    for final in (False, True)
)


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


def stream_response(pieces: Sequence[Piece], *, last: bool = True) -> Sequence[Piece]:
    """Wrap the pieces of a response as a ModelStreamInferResponse: the `last` one to its request, or one before."""
    size = 0
    for piece in pieces:
        size += len(piece) if isinstance(piece, bytes) else piece.nbytes
    return (_stream_head(size, last), *pieces)


# Most models have responses of one size.
@lru_cache(maxsize=256)
def _stream_head(size: int, last: bool) -> bytes:
    mark = _FINAL if last else _NOT_FINAL
    return bytes([_RESPONSE_TAG]) + encode_varint(size + len(mark)) + mark


def stream_error(request_id: str, addressed: tuple[str, str], status: Status) -> bytes:
    """Return a serialised ModelStreamInferResponse with the error of a request.

    `addressed` is the name and version of its model.
    """
    response = pb.ModelStreamInferResponse(error_message=status.message)
    response.infer_response.id = request_id
    response.infer_response.model_name, response.infer_response.model_version = addressed
    parameters = response.infer_response.parameters
    parameters[FINAL_PARAMETER].bool_param = True
    parameters[STATUS_PARAMETER].string_param = status.code.name
    if status.retry_after is not None:
        parameters[RETRY_PARAMETER].int64_param = max(1, round(status.retry_after * 1e3))
    return response.SerializeToString()
