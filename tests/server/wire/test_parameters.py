"""A request's parameters: some have a meaning and a type, some are reserved, others are for the model."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.errors import InvalidRequestError
from tensorferry.server.wire.parameters import RequestParameters, read_parameters


def read(**parameters: dict[str, Any]) -> RequestParameters:
    return read_parameters(
        pb.ModelInferRequest(
            parameters={key: pb.InferParameter(**given) for key, given in parameters.items()}
        )
    )


DEFAULTS = RequestParameters(math.inf, 0, explain=False)


@pytest.mark.parametrize("kind", ["int64_param", "uint64_param"])
def test_timeout_and_priority_may_be_signed_or_unsigned(kind: str) -> None:
    assert read(timeout={kind: 1500}, priority={kind: 2}) == RequestParameters(0.0015, 2, explain=False)
    assert read(timeout={kind: 0}, priority={kind: 0}) == DEFAULTS


def test_the_longest_timeout_is_not_infinite() -> None:
    assert read(timeout={"uint64_param": (1 << 64) - 1}).timeout == pytest.approx(1.8e13, rel=0.03)


def test_explain_is_a_bool() -> None:
    assert read(explain={"bool_param": True}).explain
    assert not read(explain={"bool_param": False}).explain


@pytest.mark.parametrize(
    "given",
    [
        {"sequence_start": {"bool_param": True}, "sequence_end": {"bool_param": True}},
        {"triton_enable_empty_final_response": {"bool_param": False}},
    ],
    ids=str,
)
def test_parameters_without_a_meaning_are_ignored(given: dict[str, Any]) -> None:
    assert read(**given) == DEFAULTS


def test_custom_parameters_are_for_the_model() -> None:
    given = read(
        mine={"string_param": "x"}, Triton_mine={"bool_param": True}, none={}, priority={"int64_param": 2}
    )
    assert given == RequestParameters(math.inf, 2, explain=False, custom={"mine": "x", "Triton_mine": True})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"triton_enable_empty_final_response": {"string_param": "true"}},
            "invalid value type for 'triton_enable_empty_final_response' parameter, expected bool_param, got string_param",
        ),
        (
            {"sequence_id": {"bool_param": True}},
            "invalid value type for 'sequence_id' parameter, expected int64_param or uint64_param or string_param, got bool_param",
        ),
        ({"timeout": {"int64_param": -1}}, "invalid value for 'timeout', expected value >= 0"),
    ],
    ids=str,
)
def test_reserved_keys_and_wrong_types_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read(**given)
    assert message in str(caught.value)
