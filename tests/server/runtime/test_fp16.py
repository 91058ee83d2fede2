"""Conversion of models to FP16, on the CPU: the converted model, what clients see, and errors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from support.models import small
from support.server.rig import PATIENCE, Array, Load, fp32

from tensorferry.server.config.server_config import ModelSource, ServerConfig
from tensorferry.server.errors import StartError
from tensorferry.server.models.config_pbtxt.pbtxt import parse_config
from tensorferry.server.models.lifecycle.load_context import LoadContext
from tensorferry.server.models.lifecycle.loader import load_model
from tensorferry.server.runtime.checks.sampling import random_inputs
from tensorferry.server.runtime.files.fp16 import IN_FP16, ModelFile, convert_to_fp16
from tensorferry.server.runtime.ort_options import Fp16, OrtOptions
from tensorferry.server.runtime.session import Session


@pytest.fixture
def load(load: Load) -> Load:
    """Function that loads a model in FP16. Its batcher is closed after the test."""
    return partial(load, fp16=True)


def converted(path: Path, folder: Path, *excepted: str) -> onnx.ModelProto:
    folder.mkdir()
    file = convert_to_fp16(path, Fp16(1.0, excepted), folder)
    assert file == ModelFile(path, folder / "model.onnx")
    return onnx.load(str(file.path))


def weights(model: onnx.ModelProto) -> dict[str, int]:
    return {tensor.name: tensor.data_type for tensor in model.graph.initializer}


def run(path: Path, inputs: Mapping[str, Array]) -> dict[str, Array]:
    return Session(path).run(inputs)


@pytest.mark.parametrize("build", [small.mlp, small.attention])
def test_weights_are_in_fp16_and_inputs_and_outputs_keep_their_datatypes(
    build: Callable[[Path], Path], load: Load, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model = load(build, max_batch_size=8)
    path = tmp_path / "m.onnx"
    assert model.signature == Session(path).signature
    assert model.batching == "batches of up to 8 rows (proved)"
    assert "model m in FP16: outputs differ from FP32 by at most 0.000" in caplog.text
    inputs = random_inputs(model.signature, 3, 7, seed=5)
    got, expected = model.batcher.submit_rows(inputs).result(PATIENCE), run(path, inputs)
    for spec in model.signature.outputs:
        assert got[spec.name].dtype == spec.datatype.storage == expected[spec.name].dtype
        if spec.datatype.name == "FP32":
            np.testing.assert_allclose(got[spec.name], expected[spec.name], atol=5e-3)
            assert not np.array_equal(got[spec.name], expected[spec.name]), "it was computed in FP32"
    now = weights(converted(path, tmp_path / "out"))
    before = weights(onnx.load(str(path)))
    assert TensorProto.FLOAT in before.values()
    assert {name for name, kind in now.items() if kind == TensorProto.FLOAT16} >= {
        name for name, kind in before.items() if kind == TensorProto.FLOAT
    }


def branching(path: Path) -> Path:
    """y = x w if the flag of the first row is set, else x v; the branches use weights of the outer graph."""
    outputs = [small.value("z")]
    then = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["z"])], "then", [], outputs)
    other = helper.make_graph([helper.make_node("MatMul", ["x", "v"], ["z"])], "else", [], outputs)
    return small.save(
        path,
        [
            small.node("Gather", "flag zero", "first", axis=0),
            helper.make_node("If", ["first"], ["r"], then_branch=then, else_branch=other),
            small.node("Relu", "r", "y"),
        ],
        [small.value("x"), small.value("flag", "BOOL", ["batch"])],
        [small.value("y")],
        {"w": np.eye(3, dtype=np.float32), "v": 2 * np.eye(3, dtype=np.float32), "zero": np.int64(0)},
    )


def test_branches_are_converted(tmp_path: Path) -> None:
    converted(branching(tmp_path / "m.onnx"), tmp_path / "out")
    for flag, factor in ((True, 1), (False, 2)):
        inputs = {"x": fp32(2, 3), "flag": np.array([flag, not flag])}
        assert run(tmp_path / "out" / "model.onnx", inputs)["y"].tolist() == (factor * fp32(2, 3)).tolist()


@pytest.mark.parametrize("excepted", [("Softmax",), ("MatMul", "Relu"), ("second",)])
def test_excepted_operators_and_nodes_stay_in_fp32(excepted: tuple[str, ...], tmp_path: Path) -> None:
    path = small.mlp(tmp_path / "m.onnx")
    model = onnx.load(str(path))
    model.graph.node[2].name = "second"
    onnx.save(model, str(path))
    kinds = weights(converted(path, tmp_path / "out", *excepted))
    in_fp32 = {name for name, kind in kinds.items() if kind == TensorProto.FLOAT}
    # A weight that is used only in FP32 is not converted.
    assert in_fp32 == {("Softmax",): set(), ("MatMul", "Relu"): {"w", "v"}, ("second",): {"v"}}[excepted]
    inputs = random_inputs(Session(path).signature, 2, 1)
    np.testing.assert_allclose(
        run(tmp_path / "out" / "model.onnx", inputs)["p"], run(path, inputs)["p"], atol=5e-3
    )


def test_an_unknown_name_is_reported(load: Load, caplog: pytest.LogCaptureFixture) -> None:
    load(small.mlp, 'parameters { key: "fp16_except" value { string_value: "Softmax,Sofmax" } }')
    assert "has no operator or node 'Sofmax': the name has no effect" in caplog.text
    assert "'Softmax'" not in caplog.text


def tiny(path: Path) -> Path:
    """y = 1e-9 x, which is 0 in FP16."""
    return small.save(
        path,
        [small.node("Mul", "x tiny", "y", name="shrink")],
        [small.value("x")],
        [small.value("y")],
        {"tiny": np.full(3, 1e-9, np.float32)},
    )


def test_a_difference_above_the_tolerance_is_an_error(load: Load, scratch: Path) -> None:
    with pytest.raises(StartError) as caught:
        load(tiny)
    message = str(caught.value)
    assert message.startswith("model 'm' in FP16: output 'y' differs from FP32 by 59 of its")
    assert "greatest magnitude, which is more than the tolerance, 0.02; disable FP16" in message
    assert not list(scratch.iterdir())


def warmed(path: Path, name: str, datatype: str, value: Array) -> ModelSource:
    """Return a model whose configuration has a sample of one row."""
    (path.parent / "warmup").mkdir()
    (path.parent / "warmup" / "row").write_bytes(value.tobytes())
    dims = max(1, value.size)
    config = f'''model_warmup {{
      name: "own" batch_size: 1
      inputs {{ key: "{name}" value {{ data_type: TYPE_{datatype} dims: {dims} input_data_file: "row" }} }}
    }}'''
    return ModelSource("m", path, config=parse_config(config, "test"), directory=path.parent)


def test_samples_of_the_configuration_are_compared(load: Load, tmp_path: Path) -> None:
    """Random indices are small. The indices in the sample are large."""

    def far(path: Path) -> Path:
        table = np.arange(10, dtype=np.float32).reshape(10, 1)
        table[9] = 1e6
        return small.save(
            path,
            [small.node("Gather", "table index", "y")],
            [small.value("index", "INT64", ["batch"])],
            [small.value("y", dims=["batch", 1])],
            {"table": table},
        )

    load(far)
    source = warmed(tmp_path / "m.onnx", "index", "INT64", np.array([9]))
    with pytest.raises(StartError, match=r"output 'y' differs from FP32 by 0\.93"):
        load_model(source, LoadContext(ServerConfig((source,), fp16=True)))


def test_infinities_are_refused_whatever_the_tolerance(load: Load, tmp_path: Path) -> None:
    """Input values may exceed the range of FP16."""

    def picked(path: Path) -> Path:
        """y = 2 x with its columns reordered. The CPU supports only the reordering in FP16."""
        return small.save(
            path,
            [small.node("Gather", "x order", "turned", axis=1), small.node("Mul", "turned two", "y")],
            [small.value("x")],
            [small.value("y")],
            {"order": np.array([2, 0, 1]), "two": np.full(3, 2, np.float32)},
        )

    load(picked)
    source = warmed(tmp_path / "m.onnx", "x", "FP32", np.array([1e6, 1, 1], np.float32))
    with pytest.raises(StartError, match="output 'y' differs from FP32 where it is finite"):
        load_model(source, LoadContext(ServerConfig((source,), fp16=True, fp16_tolerance=1e9)))


def test_labels_may_differ_and_are_counted(load: Load, caplog: pytest.LogCaptureFixture) -> None:
    def label(path: Path) -> Path:
        """y = 1e-9 x > 1e-8. In FP16 both constants are the smallest number."""
        return small.save(
            path,
            [small.node("Mul", "x tiny", "shrunk"), small.node("Greater", "shrunk least", "y")],
            [small.value("x")],
            [small.value("y", "BOOL")],
            {"tiny": np.full(3, 1e-9, np.float32), "least": np.full(3, 1e-8, np.float32)},
        )

    load(label)
    assert "% of output y differ from FP32" in caplog.text


def test_a_model_that_cannot_be_compared_is_served_with_a_warning(
    load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    def picky(path: Path) -> Path:
        return small.save(
            path,
            [
                small.node("Mul", "x two", "scaled"),
                small.node("Reshape", "scaled parts", "grouped"),
                small.node("ReduceSum", "grouped axes", "y", keepdims=0),
            ],
            [small.value("x", dims=["batch", "n"])],
            [small.value("y", dims=["batch", "parts"])],
            {"two": np.float32(2), "parts": np.array([0, -1, 11]), "axes": np.array([2])},
        )

    load(picky)
    assert (
        "model m in FP16 was not compared with FP32, because it does not run on random input" in caplog.text
    )


def test_a_model_without_weights_in_fp32_is_not_converted(
    load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    def half(path: Path) -> Path:
        return small.mlp(path, np.float16)

    assert str(load(half).signature) == "(x: FP16[-1, 8]) -> (p: FP16[-1, 4])"
    assert "m.onnx has no weights in FP32: it is served without conversion" in caplog.text


def test_invalid_files_are_errors(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"no model")
    with pytest.raises(StartError, match=r"m\.onnx: conversion to FP16 failed: "):
        convert_to_fp16(tmp_path / "m.onnx", Fp16(0.1), tmp_path)
    source = ModelSource("m", tmp_path / "absent.onnx")
    with pytest.raises(StartError, match=r"absent\.onnx: no such file"):
        load_model(source, LoadContext(ServerConfig((source,), fp16=True)))


def test_an_error_of_the_converted_file_names_the_original(tmp_path: Path, scratch: Path) -> None:
    (scratch / "model.onnx").write_bytes(b"no model")
    file = ModelFile(tmp_path / "own.onnx", scratch / "model.onnx", IN_FP16)
    with pytest.raises(StartError) as caught:
        file.session("cpu", OrtOptions())
    message = str(caught.value)
    assert message.startswith(
        f"{tmp_path / 'own.onnx'}: converted to FP16, ONNX Runtime cannot load it: Load model from {tmp_path / 'own.onnx'}"
    )
    assert "by the parameter fp16_except of its configuration" in message
