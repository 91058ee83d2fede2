"""Responses inside a stream: the answers to a request, the last one of which is marked, and a request's error."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.status import Status
from tensorferry.server.wire.fields import encode_varint

# A piece of a serialised message: bytes, or a row-major array that stands for its bytes.
Piece = Any

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
