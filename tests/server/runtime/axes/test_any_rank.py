"""Inputs and outputs whose number of dimensions the file does not declare: they are not scalars."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format
from support.models.shapeless import doubled, shapeless
from support.models.small import node, save, value

from tensorferry.protos.model_config_pb2 import ModelConfig
from tensorferry.server.config.server_config import ModelSource, ServerConfig
from tensorferry.server.errors import StartError
from tensorferry.server.models.lifecycle.load_context import LoadContext
from tensorferry.server.models.lifecycle.loader import load_model
from tensorferry.server.models.lifecycle.registry import Model
from tensorferry.server.runtime.session import Session


def load(path: Path, config: str = "") -> Model:
    given = text_format.Parse(config, ModelConfig()) if config else None
    model = load_model(ModelSource("m", path, config=given), LoadContext(ServerConfig(models=())))
    model.batcher.close()
    return model


def test_an_undeclared_shape_is_no_scalar(tmp_path: Path) -> None:
    signature = Session(doubled(tmp_path / "m.onnx")).signature
    assert [spec.any_rank for spec in (*signature.inputs, *signature.outputs)] == [True, True]
    assert [spec.shape for spec in (*signature.inputs, *signature.outputs)] == [(-1,), (-1,)]
    assert str(signature) == "(x: FP32[...]) -> (y: FP32[...])"
    assert signature.no_batch_axis_reason() == "the file does not say how many dimensions input 'x' has"
    scalar = save(
        tmp_path / "scalar.onnx", [node("Add", "x x", "y")], [value("x", dims=[])], [value("y", dims=[])]
    )
    assert [spec.any_rank for spec in Session(scalar).signature.inputs] == [False]


def test_an_output_of_any_rank_is_batched_if_it_follows_the_rows(tmp_path: Path) -> None:
    x, y = value("x", dims=["n", 4]), value("y", dims=["n"])
    # ONNX Runtime does not infer the number of dimensions of a shape from Compress.
    nodes = [
        node("Shape", "x", "whole"),
        node("Compress", "whole picked", "shape", axis=0),
        node("Reshape", "x shape", "y"),
    ]
    kept = shapeless(save(tmp_path / "kept.onnx", nodes, [x], [y], {"picked": np.array([True, True])}))
    model = load(kept)
    assert model.signature.outputs[0].any_rank
    assert model.batching.startswith("batches of up to 32 rows")
    assert list(model.config.output[0].dims) == [-1]
    # Reshapes to one axis, so rows are lost.
    nodes[1:2] = [node("ReduceProd", "whole", "shape", keepdims=1)]
    flat = save(tmp_path / "flat.onnx", nodes, [x], [y])
    assert load(shapeless(flat)).max_batch_size == 0


def test_a_configuration_declares_the_shape(tmp_path: Path) -> None:
    path = doubled(tmp_path / "m.onnx")
    tensors = """input { name: "x" data_type: TYPE_FP32 dims: [%s] }
        output { name: "y" data_type: TYPE_FP32 dims: [%s] }"""
    model = load(path, "max_batch_size: 8 dynamic_batching { } " + tensors % ("-1, 3", "-1, 3"))
    assert [spec.shape for spec in model.signature.inputs] == [(-1, -1, 3)]
    assert model.batching.startswith("batches of up to 8 rows")
    model = load(path, tensors % ("2, 3", "-1"))
    assert [spec.dims for spec in model.signature.inputs] == [(2, 3)]
    assert model.signature.outputs[0].any_rank
    # The completed configuration can be loaded again.
    completed = load(path).config
    assert load(path, text_format.MessageToString(completed)).signature.inputs[0].any_rank
    with pytest.raises(StartError, match="add an input with its name"):
        load(path, "max_batch_size: 8")
