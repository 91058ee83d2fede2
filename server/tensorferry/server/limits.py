"""Bounds on what one request may hold: what is beyond them can never pass, and nothing is decoded of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos.tensors import element_count
from tensorferry.server.errors import InvalidRequestError

# More than any model has, or any client has a use for.
MOST_TENSORS = 4096
MOST_DIMENSIONS = 64
MOST_PARAMETERS = 256
MOST_PARAMETER_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """`rows` of a request (0: as many as the queue holds); of each tensor of strings how many, and their length in bytes."""

    rows: int = 0
    strings: int = 1 << 20
    string_bytes: int = 16 << 20


DEFAULT = RequestLimits()


def check_message(request: pb.ModelInferRequest, limits: RequestLimits) -> None:
    """InvalidRequestError for a message of more tensors, dimensions, parameters or strings than may be."""
    for what, count in (
        ("inputs", len(request.inputs)),
        ("outputs", len(request.outputs)),
        ("raw_input_contents", len(request.raw_input_contents)),
    ):
        if count > MOST_TENSORS:
            raise InvalidRequestError(
                f"the request has {count} entries in {what}; this server takes at most {MOST_TENSORS}: send what the "
                "model takes"
            )
    if request.parameters:
        _check_parameters(request.parameters, "the request")
    for tensor in request.inputs:
        if len(tensor.shape) > MOST_DIMENSIONS:
            raise InvalidRequestError(
                f"input {tensor.name[:64]!r} has {len(tensor.shape)} dimensions; this server takes at most "
                f"{MOST_DIMENSIONS}: send the shape that the model takes"
            )
        if tensor.parameters:
            _check_parameters(tensor.parameters, f"input {tensor.name[:64]!r}")
        if tensor.datatype == "BYTES":
            _check_strings(tensor, limits)
    for output in request.outputs:
        if output.parameters:
            _check_parameters(output.parameters, f"output {output.name[:64]!r}")


def _check_parameters(parameters: Mapping[str, Any], of: str) -> None:
    if len(parameters) > MOST_PARAMETERS:
        raise InvalidRequestError(
            f"{of} has {len(parameters)} parameters; this server takes at most {MOST_PARAMETERS}: leave out those without a "
            "meaning"
        )
    for key in parameters:
        nbytes = max(len(key.encode()), len(parameters[key].string_param.encode()))
        if nbytes > MOST_PARAMETER_BYTES:
            raise InvalidRequestError(
                f"parameter {key[:64]!r} of {of} has {nbytes} bytes; this server takes at most {MOST_PARAMETER_BYTES}: send data "
                "as a tensor"
            )


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
