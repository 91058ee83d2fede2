"""Pairs of tensors that look like a state."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tensorferry.protos.tensors import DATATYPES
from tensorferry.server.onnx.inspection.probable_states import probable_states
from tensorferry.server.signature import Signature, TensorSpec


def signature(
    inputs: Mapping[str, tuple[str | int, ...]], outputs: Mapping[str, tuple[str | int, ...]]
) -> Signature:
    specs = (
        tuple(TensorSpec(name, DATATYPES["FP32"], dims) for name, dims in each.items())
        for each in (inputs, outputs)
    )
    return Signature(*specs)


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("state", "stateN"),
        ("h", "hn"),
        ("c0_in", "c0_out"),
        ("past_key_values.0.key", "present_key_values.0.key"),
        ("cached_len_3", "new_cached_len_3"),
        ("prev_hidden", "next_hidden"),
    ],
)
def test_names_that_differ_in_a_word(given: str, taken: str) -> None:
    of = signature({"x": ("n", 4), given: (2, "n", 8)}, {"y": ("n", 4), taken: (2, "n", 8)})
    assert probable_states(of) == {given: taken}


def test_other_tensors_are_none() -> None:
    of = signature(
        {"input": ("n", 4), "h": ("n", 8)}, {"output": ("n", 5), "hn": ("n", 9), "logits": ("n", 8)}
    )
    assert probable_states(of) == {}
    # Each of the outputs could be the next value.
    of = signature({"h": ("n", 8)}, {"hn": ("n", 8), "h_out": ("n", 8)})
    assert probable_states(of) == {}
