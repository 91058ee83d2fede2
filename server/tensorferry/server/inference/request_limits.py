"""Bounds that the operator sets on what one request may hold. `wire.bounds` has those that are fixed."""

from __future__ import annotations

from typing import Any

from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos.tensors import element_count
from tensorferry.server.config.limits import RequestLimits
from tensorferry.server.errors import InvalidRequestError

DEFAULT = RequestLimits()


def check_claims(request: pb.ModelInferRequest, limits: RequestLimits) -> None:
    """InvalidRequestError for a tensor whose shape claims more strings than may be."""
    for tensor in request.inputs:
        if tensor.datatype == "BYTES":
            _check_strings(tensor, limits)


def _check_strings(tensor: pb.ModelInferRequest.InferInputTensor, limits: RequestLimits) -> None:
    # What is claimed: what was sent must agree with it, and whoever decodes it looks.
    count = max(element_count(tensor.shape), len(tensor.contents.bytes_contents))
    if count > limits.strings:
        raise InvalidRequestError(
            f"input {tensor.name[:64]!r} has {count} strings; this server takes at most {limits.strings} in a tensor: send less "
            "at once, or start it with a larger --max-strings"
        )


def check_lengths(array: Any, name: str, limits: RequestLimits) -> None:
    """InvalidRequestError for a string, of those that were decoded, that is longer than may be."""
    longest = max(map(len, array.flat), default=0)
    if longest > limits.string_bytes:
        raise InvalidRequestError(
            f"input {name!r} has a string of {longest} bytes; this server takes at most {limits.string_bytes}: send shorter "
            "ones, or start it with a larger --max-string-bytes"
        )
