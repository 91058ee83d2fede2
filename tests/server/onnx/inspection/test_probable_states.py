"""Pairs of tensors that look like a state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from support.server.rig import signature, spec

from tensorferry.server.onnx.inspection.probable_states import probable_states


def of(inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> Mapping[str, str]:
    """Return what is found for FP32 tensors with these dimensions."""
    specs = [[spec(name, "FP32", *dims) for name, dims in each.items()] for each in (inputs, outputs)]
    return probable_states(signature(*specs[0], outputs=tuple(specs[1])))


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
    assert of({"x": ("n", 4), given: (2, "n", 8)}, {"y": ("n", 4), taken: (2, "n", 8)}) == {given: taken}


def test_other_tensors_are_none() -> None:
    outputs = {"output": ("n", 5), "hn": ("n", 9), "logits": ("n", 8)}
    assert of({"input": ("n", 4), "h": ("n", 8)}, outputs) == {}
    # Each of the outputs could be the next value.
    assert of({"h": ("n", 8)}, {"hn": ("n", 8), "h_out": ("n", 8)}) == {}
