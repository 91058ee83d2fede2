"""Conversion of models to FP16, on the CPU: the converted model, what clients see, and errors."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from support.models import small
from support.models.scaled import with_defaults
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
    assert convert_to_fp16(path, Fp16(1.0, excepted), folder) == folder / "model.onnx"
    return onnx.load(str(folder / "model.onnx"))


def weights(model: onnx.ModelProto) -> dict[str, int]:
    return {tensor.name: tensor.data_type for tensor in model.graph.initializer}


def run(path: Path, inputs: Mapping[str, Array]) -> dict[str, Array]:
    return Session(path).run(inputs)


def test_weights_are_in_fp16_and_inputs_and_outputs_keep_their_datatypes(load: Load, tmp_path: Path) -> None:
    model = load(small.attention, max_batch_size=8)
    path = tmp_path / "m.onnx"
    assert model.signature == Session(path).signature
    assert model.batching == "batches of up to 8 rows (proved)"
    inputs = random_inputs(model.signature, 3, 7, seed=5)
    got, expected = model.batcher.submit_rows(inputs).result(PATIENCE), run(path, inputs)
    for spec in model.signature.outputs:
        assert got[spec.name].dtype == spec.datatype.storage == expected[spec.name].dtype
    now = weights(converted(path, tmp_path / "out"))
    before = weights(onnx.load(str(path)))
    assert TensorProto.FLOAT in before.values()
    assert {name for name, kind in now.items() if kind == TensorProto.FLOAT16} >= {
        name for name, kind in before.items() if kind == TensorProto.FLOAT
    }


# If the flag of the first row is set, y = x w, else y = x v. The branches use weights of the outer graph.
BRANCHING = """(float[batch, 3] x, bool[batch] flag) => (float[batch, 3] y) {
    first = Gather <axis = 0> (flag, zero)
    r = If <then_branch = a () => (float[batch, 3] z) { z = MatMul (x, w) },
        else_branch = b () => (float[batch, 3] z) { z = MatMul (x, v) }> (first)
    y = Relu (r)
}"""


def test_branches_are_converted(tmp_path: Path) -> None:
    w = np.eye(3, dtype=np.float32)
    path = small.written(tmp_path / "m.onnx", BRANCHING, zero=np.int64(0), w=w, v=2 * w)
    converted(path, tmp_path / "out")
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


def test_a_difference_above_the_tolerance_is_an_error(load: Load, scratch: Path) -> None:
    # y is 0 in FP16.
    text = "(float[batch, 3] x) => (float[batch, 3] y) { y = Mul (x, tiny) }"
    with pytest.raises(StartError) as caught:
        load(partial(small.written, text=text, tiny=np.full(3, 1e-9, np.float32)))
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

    table = np.arange(10, dtype=np.float32).reshape(10, 1)
    table[9] = 1e6
    text = "(int64[batch] index) => (float[batch, 1] y) { y = Gather (table, index) }"
    load(partial(small.written, text=text, table=table))
    source = warmed(tmp_path / "m.onnx", "index", "INT64", np.array([9]))
    with pytest.raises(StartError, match=r"output 'y' differs from FP32 by 0\.93"):
        load_model(source, LoadContext(ServerConfig((source,), fp16=True)))


def test_infinities_are_refused_whatever_the_tolerance(load: Load, tmp_path: Path) -> None:
    """Input values may exceed the range of FP16."""

    # y = 2 x with its columns reordered. The CPU supports only the reordering in FP16.
    text = """(float[batch, 3] x) => (float[batch, 3] y) {
        turned = Gather <axis = 1> (x, order) y = Mul (turned, two)
    }"""
    two = np.full(3, 2, np.float32)
    load(partial(small.written, text=text, order=np.array([2, 0, 1]), two=two))
    source = warmed(tmp_path / "m.onnx", "x", "FP32", np.array([1e6, 1, 1], np.float32))
    with pytest.raises(StartError, match="output 'y' differs from FP32 where it is finite"):
        load_model(source, LoadContext(ServerConfig((source,), fp16=True, fp16_tolerance=1e9)))


def test_labels_may_differ_and_are_counted(load: Load, caplog: pytest.LogCaptureFixture) -> None:
    # In FP16 both constants are the smallest number.
    text = """(float[batch, 3] x) => (bool[batch, 3] y) {
        shrunk = Mul (x, tiny) y = Greater (shrunk, least)
    }"""
    tiny, least = np.full(3, 1e-9, np.float32), np.full(3, 1e-8, np.float32)
    load(partial(small.written, text=text, tiny=tiny, least=least))
    assert "% of output y differ from FP32" in caplog.text


def test_a_model_that_cannot_be_compared_is_served_with_a_warning(
    load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    text = """(float[batch, n] x) => (float[batch, parts] y) {
        scaled = Mul (x, two) grouped = Reshape (scaled, parts) y = ReduceSum <keepdims = 0> (grouped, axes)
    }"""
    parts, axes = np.array([0, -1, 11]), np.array([2])
    load(partial(small.written, text=text, two=np.float32(2), parts=parts, axes=axes))
    assert (
        "model m in FP16 was not compared with FP32, because it does not run on random input" in caplog.text
    )


def test_a_model_without_weights_in_fp32_is_not_converted(
    load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    assert str(load(partial(small.mlp, dtype=np.float16)).signature) == "(x: FP16[-1, 8]) -> (p: FP16[-1, 4])"
    assert "m.onnx has no weights in FP32: it is served without conversion" in caplog.text


def test_optional_inputs_that_are_converted_are_named(load: Load, caplog: pytest.LogCaptureFixture) -> None:
    assert load(with_defaults).signature.optional == ()
    assert "it has no optional inputs; clients cannot send its 2, such as 'bias'" in caplog.text


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
