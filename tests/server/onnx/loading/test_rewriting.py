"""A model whose batch axis is fixed to 1 is served batched by a copy, if the copy is proved and gives the file's answers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from support.models import mixing, small
from support.server.rig import Load

from tensorferry.server.config.server_config import ModelSource, ServerConfig
from tensorferry.server.errors import StartError
from tensorferry.server.onnx.inspection.inspection import Inspection, Wanted, inspect_model
from tensorferry.server.onnx.loading import rewriting
from tensorferry.server.runtime.files.fp16 import model_file

REWRITTEN = "batches of up to 32 rows (proved, rewritten)"


def fixed(path: Path) -> Path:
    return small.twice(path, dims=(1, 3))


def perceptron(path: Path) -> Path:
    """x [1, 2, 4] → y [1, 3], by a Reshape to one row."""
    text = "(float[1, 2, 4] x) => (float[1, 3] y) { f = Reshape (x, flat) y = MatMul (f, w) }"
    w = np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32)
    return small.written(path, text, flat=np.array([1, 8]), w=w)


def test_the_log_says_if_optional_inputs_are_gone(load: Load, caplog: pytest.LogCaptureFixture) -> None:
    """The target of the Reshape is known only if clients cannot send it."""

    def with_default(path: Path) -> Path:
        model = onnx.load(perceptron(path))
        model.graph.input.append(onnx.helper.make_tensor_value_info("flat", onnx.TensorProto.INT64, [2]))
        onnx.save(model, path)
        return path

    caplog.set_level(logging.INFO)
    assert load(with_default).signature.optional == ()
    assert (
        "give the file's answers; clients cannot send its inputs that have defaults (--batching"
        in caplog.text
    )


def centred(path: Path) -> Path:
    """x [1, 3] → y [1, 3], without the mean of all rows."""
    text = "(float[1, 3] x) => (float[1, 3] y) { m = ReduceMean <axes = [0]> (x) y = Sub (x, m) }"
    return small.written(path, text)


@pytest.mark.parametrize("build", [perceptron, small.streaming, centred])
def test_a_later_load_does_not_search_again(
    build: Callable[[Path], Path], load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither for changes that were found, nor if there are none."""
    first = load(build)

    def refuse(path: Path, **_: Any) -> None:
        raise AssertionError(f"{path} is searched again")

    monkeypatch.setattr(rewriting, "free_rows", refuse)
    monkeypatch.setattr(rewriting, "batch_first", refuse)
    again = load(build)
    assert (again.batching, again.max_batch_size) == (first.batching, first.max_batch_size)
    assert str(again.signature) == str(first.signature)


@pytest.mark.parametrize("options", [{"batching_rewrite": False}, {"max_batch_size": 0}])
def test_it_can_be_switched_off(options: dict[str, Any], load: Load) -> None:
    model = load(fixed, **options)
    assert (model.max_batch_size, model.batching_verdict) == (0, "off")
    assert str(model.signature) == "(x: FP32[1, 3]) -> (y: FP32[1, 3])"


def test_trust_does_not_replace_the_proof(load: Load) -> None:
    assert load(perceptron, batching="trust").batching == REWRITTEN


def test_a_model_whose_rows_would_mix_is_served_as_it_is(
    load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    model = load(centred, batching="trust")
    assert (model.max_batch_size, model.batching_verdict) == (0, "off")
    assert (
        "and no copy with a variable batch axis is proved: ReduceMean m reduces over the batch axis"
        in model.batching
    )
    assert "to have it batched: compute over the axes of one row" in caplog.text


def test_a_model_that_would_only_be_tested_is_served_as_it_is(load: Load) -> None:
    model = load(lambda path: one_row(mixing.hashed(path)))
    assert (model.max_batch_size, model.batching_verdict) == (0, "off")
    assert "cannot be analysed" in model.batching


def one_row(path: Path) -> Path:
    """Fix the first axis of a model's inputs and outputs to 1."""
    model = onnx.load(path)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 1
    onnx.save(model, path)
    return path


def test_a_copy_with_other_answers_than_the_file_is_not_served(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graphs give equal answers; a device that computes otherwise for a variable axis would not."""

    def changed(*arguments: Any) -> Any:
        file = model_file(*arguments)
        model = onnx.load(file.path)
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(1.01, np.float32), "factor"))
        model.graph.node[-1].output[0] = "before"
        model.graph.node.append(small.node("Mul", "before factor", "y"))
        onnx.save(model, file.path)
        return file

    monkeypatch.setattr(rewriting, "model_file", changed)
    model = load(fixed)
    assert (model.max_batch_size, model.batching_verdict) == (0, "off")
    assert "output 'y' of a row depends on other rows" in model.batching


def test_a_model_with_a_variable_first_axis_of_another_input_is_served_as_it_is(load: Load) -> None:
    """Requests may use that axis for lengths."""

    scaled = "(float[1, 4096] x, float[n, 1] z) => (float[n, 4096] y) { y = Mul (x, z) }"
    model = load(lambda path: small.written(path, scaled))
    assert model.max_batch_size == 0
    answer = model.batcher.submit({"x": np.ones((1, 4096), np.float32), "z": np.ones((5, 1), np.float32)})
    assert answer.result(30)["y"].shape == (5, 4096)


def with_weights(path: Path, factor: float) -> Path:
    path.parent.mkdir()
    text = "(float[1, 3] x) => (float[1, 3] y) { y = Mul (x, w) }"
    model = onnx.load(small.written(path, text, w=np.full(3, factor, np.float32)))
    onnx.save(model, path, save_as_external_data=True, size_threshold=0, location="weights")
    return path


def test_a_written_copy_replaces_no_weights_of_another_model(tmp_path: Path) -> None:
    """The first copy has its model's own weights, by a link."""
    one, two = (with_weights(tmp_path / name / "m.onnx", factor) for name, factor in (("1", 1.0), ("2", 2.0)))
    (tmp_path / "copies").mkdir()
    for _ in range(2):
        inspected(one, write_batched=tmp_path / "copies" / "one.onnx")
    with pytest.raises(StartError, match=r"weights would replace .*weights, which is another file"):
        inspected(two, write_batched=tmp_path / "copies" / "two.onnx")
    with pytest.raises(StartError, match="is the name of its weights file"):
        inspected(one, write_batched=tmp_path / "1" / "weights")
    assert np.frombuffer((tmp_path / "1" / "weights").read_bytes(), np.float32).tolist() == [1, 1, 1]


def inspected(path: Path, **wanted: Any) -> Inspection:
    source = ModelSource(path.stem, path)
    (found,) = inspect_model(source, ServerConfig((source,), device="cpu"), Wanted(measure=False, **wanted))
    return found


def test_inspect_writes_the_copy(tmp_path: Path) -> None:
    path, target = perceptron(tmp_path / "m.onnx"), tmp_path / "free.onnx"
    found = inspected(path, write_batched=target)
    assert (found.decision.rewritten, found.decision.description) == (True, REWRITTEN)
    assert inspected(target).decision.description == "batches of up to 32 rows (proved)"
    with pytest.raises(StartError, match="nothing to write: it is batched as it is"):
        inspected(target, write_batched=tmp_path / "again.onnx")
    with pytest.raises(StartError, match="would replace the model"):
        inspected(path, write_batched=path)
    app = tmp_path / "app.py"
    app.write_text("")
    with pytest.raises(StartError, match="takes an ONNX file"):
        inspected(app, write_batched=target)
