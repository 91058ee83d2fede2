"""The parameters of a request: which have a meaning here, of what kind they are, and which are reserved.

Messages keep the wording by which Triton's clients recognise them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.errors import InvalidRequestError, truncate

# A request with this parameter true learns what batch it rode in, from the response's parameters.
EXPLAIN = "explain"
# Microseconds from the request's arrival to its deadline, as Triton's clients send it.
TIMEOUT = "timeout"
# The request's class, 1 the highest, as Triton's clients send it.
PRIORITY = "priority"

# Keys that start so are Triton's own; of these a request may have one.
_RESERVED = "triton_"
_EMPTY_FINAL = "triton_enable_empty_final_response"

# What a key may be given as where that is not any kind. As in Triton, the parameters of a sequence are
# held against their kinds and mean nothing to a model that has no sequence batching, which none has here.
# `timeout` may be unsigned, which Triton refuses: a client's library may have no other integer for it.
_KINDS = {
    TIMEOUT: ("int64_param", "uint64_param"),
    PRIORITY: ("int64_param", "uint64_param"),
    "sequence_id": ("int64_param", "string_param"),
    "sequence_start": ("bool_param",),
    "sequence_end": ("bool_param",),
    _EMPTY_FINAL: ("bool_param",),
}


_MEANINGS = {
    TIMEOUT: " (microseconds from the request's arrival, 0 for none)",
    PRIORITY: " (the class, from 1, the highest; 0 for none)",
}


class RequestParameters(NamedTuple):
    """What a request's parameters say.

    `timeout` is in seconds, inf for none; `priority` the class, 0 for none.
    """

    timeout: float
    priority: int
    explain: bool


_NONE = RequestParameters(math.inf, 0, explain=False)


def read_parameters(request: pb.ModelInferRequest) -> RequestParameters:
    """The parameters that have a meaning; InvalidRequestError for one that is reserved, or of a wrong kind.

    All others are custom parameters, for which an ONNX model has no use: they are passed over.
    """
    given = request.parameters
    if not given:
        return _NONE
    for key in given:
        if key in _KINDS:
            parameter_value(given[key], key, *_KINDS[key])
        elif key.startswith(_RESERVED):
            raise InvalidRequestError(
                f"parameter keys starting with {_RESERVED!r} are reserved for Triton usage, got {truncate(key)!r}. Only the "
                f"following keys starting with {_RESERVED!r} are allowed: {_EMPTY_FINAL}"
            )
    return RequestParameters(
        timeout=(_natural(given, TIMEOUT) or math.inf) / 1e6,
        priority=_natural(given, PRIORITY),
        explain=EXPLAIN in given and given[EXPLAIN].bool_param,
    )


def parameter_value(parameter: pb.InferParameter, key: str, *kinds: str, of: str = "") -> Any:
    """The value of a parameter that must be of one of these kinds; `of` says whose it is, in a message."""
    kind = parameter.WhichOneof("parameter_choice")
    if kind not in kinds:
        raise InvalidRequestError(
            f"invalid value type for {truncate(key)!r} parameter{of}, expected {' or '.join(kinds)}"
            f"{_MEANINGS.get(key, '')}, got {kind or 'none'}"
        )
    return getattr(parameter, kind)


def _natural(given: Any, key: str) -> int:
    """A parameter that is an integer of at least 0; 0 when the request has none."""
    if key not in given:
        return 0
    value: int = parameter_value(given[key], key, *_KINDS[key])
    if value < 0:
        raise InvalidRequestError(
            f"invalid value for {key!r}, expected value >= 0{_MEANINGS[key]}, got {value}"
        )
    return value
