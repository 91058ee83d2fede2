"""The operator's limits on one request. `wire.bounds` has the fixed ones."""

from __future__ import annotations

from typing import Any

from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos.tensors import element_count
from tensorferry.server.config.limits import RequestLimits
from tensorferry.server.errors import InvalidRequestError
from tensorferry.server.wire.bounds import MAX_STRINGS

DEFAULT_LIMITS = RequestLimits()


def check_string_counts(request: pb.ModelInferRequest) -> None:
    """Raise InvalidRequestError for a tensor whose shape has more strings than allowed."""
    for tensor in request.inputs:
        if tensor.datatype != "BYTES":
            continue
        # The shape's count, because decoding checks later that the contents agree with it.
        count = max(element_count(tensor.shape), len(tensor.contents.bytes_contents))
        if count > MAX_STRINGS:
            raise InvalidRequestError(
                f"input {tensor.name[:64]!r} has {count} strings; this server takes at most {MAX_STRINGS} in a tensor: send "
                "less at once"
            )


def check_string_lengths(array: Any, name: str, limits: RequestLimits) -> None:
    """Raise InvalidRequestError for a string that is longer than allowed."""
    longest = max(map(len, array.flat), default=0)
    if longest > limits.string_bytes:
        raise InvalidRequestError(
            f"input {name!r} has a string of {longest} bytes; this server takes at most {limits.string_bytes}: send shorter "
            "ones, or start it with a larger --max-string-bytes"
        )
