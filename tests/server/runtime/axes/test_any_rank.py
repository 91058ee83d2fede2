"""Inputs and outputs whose number of dimensions the file does not declare: they are not scalars."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format
from support.models.shapeless import doubled, shapeless
from support.models.small import written
from support.server.rig import Load

from tensorferry.server.errors import StartError
from tensorferry.server.runtime.session import Session


def test_an_undeclared_shape_is_no_scalar(tmp_path: Path) -> None:
    signature = Session(doubled(tmp_path / "m.onnx")).signature
    assert [spec.any_rank for spec in (*signature.inputs, *signature.outputs)] == [True, True]
    assert [spec.shape for spec in (*signature.inputs, *signature.outputs)] == [(-1,), (-1,)]
    assert str(signature) == "(x: FP32[...]) -> (y: FP32[...])"
    assert signature.no_batch_axis_reason() == "the file does not say how many dimensions input 'x' has"
    scalar = written(tmp_path / "scalar.onnx", "(float x) => (float y) { y = Add (x, x) }")
    assert [spec.any_rank for spec in Session(scalar).signature.inputs] == [False]


def test_an_output_of_any_rank_is_batched_if_it_follows_the_rows(load: Load) -> None:
    def reshaped(to: str) -> Callable[[Path], Path]:
        text = f"(float[n, 4] x) => (float[n] y) {{ whole = Shape (x) shape = {to} y = Reshape (x, shape) }}"
        return lambda path: shapeless(written(path, text, picked=np.array([True, True])))

    # ONNX Runtime does not infer the number of dimensions of a shape from Compress.
    model = load(reshaped("Compress <axis = 0> (whole, picked)"))
    assert model.signature.outputs[0].any_rank
    assert model.batching.startswith("batches of up to 32 rows")
    assert list(model.config.output[0].dims) == [-1]
    # Reshapes to one axis, so rows are lost.
    assert load(reshaped("ReduceProd <keepdims = 1> (whole)")).max_batch_size == 0


def test_a_configuration_declares_the_shape(load: Load) -> None:
    tensors = """input { name: "x" data_type: TYPE_FP32 dims: [%s] }
        output { name: "y" data_type: TYPE_FP32 dims: [%s] }"""
    model = load(doubled, "max_batch_size: 8 dynamic_batching { } " + tensors % ("-1, 3", "-1, 3"))
    assert [spec.shape for spec in model.signature.inputs] == [(-1, -1, 3)]
    assert model.batching.startswith("batches of up to 8 rows")
    model = load(doubled, tensors % ("2, 3", "-1"))
    assert [spec.dims for spec in model.signature.inputs] == [(2, 3)]
    assert model.signature.outputs[0].any_rank
    # The completed configuration can be loaded again.
    completed = load(doubled).config
    assert load(doubled, text_format.MessageToString(completed)).signature.inputs[0].any_rank
    with pytest.raises(StartError, match="add an input with its name"):
        load(doubled, "max_batch_size: 8")
