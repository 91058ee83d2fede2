"""Signature of an ONNX file, in the terms of the protocol."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support.server.rig import signature, spec

from tensorferry.server.errors import StartError
from tensorferry.server.signature import Signature, signature_of


def node_description(name: str, kind: str, shape: list[Any]) -> Any:
    """Return an input or output as ONNX Runtime describes it."""
    return SimpleNamespace(name=name, type=kind, shape=shape)


KINDS = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float double bfloat16 string"
NAMES = "BOOL INT8 INT16 INT32 INT64 UINT8 UINT16 UINT32 UINT64 FP16 FP32 FP64 BF16 BYTES"


@pytest.mark.parametrize(("kind", "datatype"), [*zip(KINDS.split(), NAMES.split(), strict=True)])
def test_each_type_of_the_protocol_has_its_datatype(kind: str, datatype: str) -> None:
    made = signature_of([node_description("x", f"tensor({kind})", [])], [])
    assert made.inputs[0].datatype.name == datatype


def test_a_zipmap_is_refused_with_what_to_change() -> None:
    nodes = [node_description("output_probability", "seq(map(int64,tensor(float)))", [])]
    with pytest.raises(StartError, match="'zipmap': False"):
        signature_of([], nodes)


@pytest.mark.parametrize("kind", ["tensor(complex64)", "seq(tensor(float))"])
@pytest.mark.parametrize("end", ["input", "output"])
def test_a_type_that_the_protocol_lacks_is_refused_by_name(kind: str, end: str) -> None:
    nodes = [node_description("good", "tensor(float)", []), node_description("bad", kind, [])]
    with pytest.raises(StartError) as caught:
        signature_of(*((nodes, []) if end == "input" else ([], nodes)))
    assert f"{end} 'bad' is of type {kind}, which the protocol cannot carry" in str(caught.value)


def test_dimensions_are_sizes_or_names() -> None:
    (made,) = signature_of([node_description("x", "tensor(float)", ["batch", 3, None, 0, -1])], []).inputs
    assert made.dims[:4] == ("batch", 3, "", 0)
    assert isinstance(made.dims[4], str)
    assert made.shape == (-1, 3, -1, 0, -1)
    assert str(made) == "x: FP32[-1, 3, -1, 0, -1]"


def test_a_signature_as_text() -> None:
    made = signature(spec("x", "FP32", "b", 2), spec("t", "BYTES"), outputs=(spec("y", "INT8", 4),))
    assert str(made) == "(x: FP32[-1, 2], t: BYTES[]) -> (y: INT8[4])"


BATCHED = spec("good", "FP32", "", 3)


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (signature(BATCHED), None),
        (signature(BATCHED, spec("n", "INT64", "other_name")), None),
        # Requests with equal values can share a batch, if another input has rows.
        (signature(BATCHED, spec("s", "FP32"), outputs=(BATCHED,)), None),
        (signature(BATCHED, spec("w", "FP32", 1, 3), outputs=(BATCHED,)), None),
        (signature(spec("s", "FP32"), outputs=(BATCHED,)), "input 's' is a scalar"),
        (signature(spec("w", "FP32", 1, 3), outputs=(BATCHED,)), "the first dimension of input 'w' is fixed to 1"),
        (signature(BATCHED, outputs=(spec("loss", "FP32"),)), "output 'loss' is a scalar"),
        (signature(BATCHED, outputs=(BATCHED, spec("c", "FP32", 8))), "the first dimension of output 'c' is fixed to 8"),
        (Signature((), (BATCHED,)), "the model has no inputs"),
    ],
)  # fmt: skip
def test_a_batch_axis_is_a_variable_first_dimension_of_an_input_and_of_all_outputs(
    made: Signature, reason: str | None
) -> None:
    assert made.no_batch_axis_reason() == reason
