"""The parameters of a request: their meaning, their types, and which names are reserved.

Error messages keep Triton's wording, because clients recognise errors by it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.errors import InvalidRequestError, truncate

# If true, the response's parameters describe the batch that the request was in.
EXPLAIN = "explain"
# Microseconds from the request's arrival to its deadline, as Triton's clients send it.
TIMEOUT = "timeout"
# The request's class, 1 the highest, as Triton's clients send it.
PRIORITY = "priority"

# Of a request that belongs to a sequence, as Triton's clients send them.
SEQUENCE_ID, SEQUENCE_START, SEQUENCE_END = "sequence_id", "sequence_start", "sequence_end"

# The key of the only element of a BYTES input, and with a number those of several, from `text_0`.
TEXT = "text"
_TEXT_KEYS = re.compile(f"{TEXT}(_[0-9]+)?")

# Most characters of the id of a sequence, because ids of ended sequences are kept.
LONGEST_ID = 256

# Prefix of Triton's own keys, and the only such key that a request may have.
_RESERVED = "triton_"
_EMPTY_FINAL = "triton_enable_empty_final_response"

# The types of parameters with a fixed type. As in Triton, a sequence's parameters are checked also for a model without
# sequences, for which they have no meaning. Integers may be unsigned, unlike in Triton over gRPC, because some clients'
# libraries have no other integer, and because ids in JSON go up to 2^64 - 1.
_KINDS = {
    TIMEOUT: ("int64_param", "uint64_param"),
    PRIORITY: ("int64_param", "uint64_param"),
    SEQUENCE_ID: ("int64_param", "uint64_param", "string_param"),
    SEQUENCE_START: ("bool_param",),
    SEQUENCE_END: ("bool_param",),
    _EMPTY_FINAL: ("bool_param",),
}

_MEANINGS = {
    TIMEOUT: " (microseconds from the request's arrival, 0 for none)",
    PRIORITY: " (the class, from 1, the highest; 0 for none)",
}


class RequestParameters(NamedTuple):
    """The parameters that have a meaning here.

    `timeout` is in seconds, inf for none. `priority` is a class, 0 for none. `sequence` is None for a request without a
    sequence's id; an id of 0 or "" is none, too. `empty_final` asks a model that answers in streams for a response without
    outputs after the last answer. `custom` are Triton's custom parameters, which only the model may know.
    """

    timeout: float
    priority: int
    explain: bool
    sequence: SequenceParameters | None = None
    empty_final: bool = False
    custom: Mapping[str, Any] = MappingProxyType({})


class SequenceParameters(NamedTuple):
    """The sequence of a request, and whether the request is its first and its last."""

    id: int | str
    start: bool
    end: bool


_NONE = RequestParameters(math.inf, 0, explain=False)


def read_parameters(request: pb.ModelInferRequest) -> RequestParameters:
    """Return a request's parameters. InvalidRequestError for a reserved key or a wrong type."""
    parameters = request.parameters
    if not parameters:
        return _NONE
    for key in parameters:
        if key in _KINDS:
            parameter_value(parameters[key], key, *_KINDS[key])
        elif key.startswith(_RESERVED):
            raise InvalidRequestError(
                f"parameter keys starting with {_RESERVED!r} are reserved for Triton usage, got {truncate(key)!r}. Only the "
                f"following keys starting with {_RESERVED!r} are allowed: {_EMPTY_FINAL}"
            )
    return RequestParameters(
        timeout=(_natural(parameters, TIMEOUT) or math.inf) / 1e6,
        priority=_natural(parameters, PRIORITY),
        explain=EXPLAIN in parameters and parameters[EXPLAIN].bool_param,
        sequence=_sequence(parameters),
        empty_final=_EMPTY_FINAL in parameters and parameters[_EMPTY_FINAL].bool_param,
        custom={
            key: getattr(parameters[key], kind)
            for key in parameters
            if key not in _KINDS
            and key != EXPLAIN
            and (kind := parameters[key].WhichOneof("parameter_choice"))
        },
    )


def _sequence(parameters: Any) -> SequenceParameters | None:
    if SEQUENCE_ID not in parameters:
        return None
    number = parameter_value(parameters[SEQUENCE_ID], SEQUENCE_ID, *_KINDS[SEQUENCE_ID])
    if not number:
        return None
    if isinstance(number, str) and len(number) > LONGEST_ID:
        raise InvalidRequestError(
            f"'sequence_id' has {len(number)} characters; it must have at most {LONGEST_ID}: give a shorter one"
        )
    start, end = (key in parameters and parameters[key].bool_param for key in (SEQUENCE_START, SEQUENCE_END))
    return SequenceParameters(number, start, end)


def text_parameters(tensor: pb.ModelInferRequest.InferInputTensor) -> Sequence[bytes] | None:
    """Return the elements that an input has as texts in its parameters; None if it has none there.

    JSON has no bytes: in typed contents, grpcurl needs each string in base64.
    """
    parameters = tensor.parameters
    keys = [key for key in parameters if _TEXT_KEYS.fullmatch(key)]
    if not keys:
        return None
    expected = [TEXT] if keys == [TEXT] else [f"{TEXT}_{number}" for number in range(len(keys))]
    if set(keys) != set(expected):
        raise InvalidRequestError(
            f"input {truncate(tensor.name)!r} has the parameters {truncate(', '.join(sorted(keys)))}; give {TEXT!r} for one "
            f"element, or '{TEXT}_0', '{TEXT}_1' and so on for several, without gaps"
        )
    of = f" of input {truncate(tensor.name)!r}"
    return [parameter_value(parameters[key], key, "string_param", of=of).encode() for key in expected]


def parameter_value(parameter: pb.InferParameter, key: str, *kinds: str, of: str = "") -> Any:
    """Return the value of a parameter of one of these types. `of` names its owner in the error."""
    kind = parameter.WhichOneof("parameter_choice")
    if kind not in kinds:
        raise InvalidRequestError(
            f"invalid value type for {truncate(key)!r} parameter{of}, expected {' or '.join(kinds)}"
            f"{_MEANINGS.get(key, '')}, got {kind or 'none'}"
        )
    return getattr(parameter, kind)


def _natural(parameters: Any, key: str) -> int:
    """Return an integer parameter of at least 0; 0 if the request has none."""
    if key not in parameters:
        return 0
    value: int = parameter_value(parameters[key], key, *_KINDS[key])
    if value < 0:
        raise InvalidRequestError(
            f"invalid value for {key!r}, expected value >= 0{_MEANINGS[key]}, got {value}"
        )
    return value
