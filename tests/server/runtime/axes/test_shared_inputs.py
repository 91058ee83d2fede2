"""Inputs without a batch axis: requests share a batch if these inputs are equal."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from google.protobuf import text_format
from support.models.scaled import scaled, sometimes_mixing
from support.models.small import written
from support.server.rig import Load, signature, spec

from tensorferry.server.config.option_groups.batching import PadLengths
from tensorferry.server.errors import StartError
from tensorferry.server.onnx.batching.comparison_runs import ComparisonSettings
from tensorferry.server.onnx.batching.shared_inputs import mixing_through_shared_inputs
from tensorferry.server.runtime.session import Session


def test_which_signatures_have_a_batch_axis() -> None:
    x, y = spec("x", "FP32", "n", 3), spec("y", "FP32", "n", 3)
    assert signature(x, spec("s", "FP32"), outputs=(y,)).no_batch_axis_reason() is None
    assert signature(x, spec("s", "BYTES", 7), outputs=(y,)).no_batch_axis_reason() is None
    assert signature(x, spec("s", "FP32"), outputs=(y,)).shared_inputs(batched=True) == {1}
    assert signature(x, spec("s", "FP32"), outputs=(y,)).shared_inputs(batched=False) == set()
    # Inputs too large to compare, and inputs without a fixed size.
    for others in ([spec("s", "FP32", 1, 3, 224, 224)], [spec("s", "FP32", 1, "k")]):
        assert (
            signature(x, *others, outputs=(y,)).no_batch_axis_reason()
            == "the first dimension of input 's' is fixed to 1"
        )
    assert signature(spec("x", "FP32", 1, 3), outputs=(y,)).no_batch_axis_reason() is not None
    assert signature(x, outputs=(spec("y", "FP32"),)).no_batch_axis_reason() == "output 'y' is a scalar"


def test_a_model_with_shared_inputs_is_batched(load: Load) -> None:
    model = load(scaled)
    assert model.batching.startswith("batches of up to 32 rows")
    assert [one.is_shape_tensor for one in model.config.input] == [False, True]
    # The completed configuration can be loaded again.
    again = load(scaled, text_format.MessageToString(model.config))
    assert again.signature == model.signature
    assert load(sometimes_mixing).max_batch_size == 0


def test_the_batching_test_runs_several_values(tmp_path: Path) -> None:
    session = Session(sometimes_mixing(tmp_path / "m.onnx"))
    found = mixing_through_shared_inputs(session.signature, session.run, ComparisonSettings(4), 4)
    assert found is not None
    assert "depends on other rows" in found
    session = Session(scaled(tmp_path / "scaled.onnx"))
    assert mixing_through_shared_inputs(session.signature, session.run, ComparisonSettings(4), 4) == ""


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        (
            '{ name: "x" data_type: TYPE_FP32 dims: [3] } input { name: "scale" data_type: TYPE_FP32 }',
            "first dimension must be -1",
        ),
        (
            '{ name: "x" data_type: TYPE_FP32 dims: [-1, 3] is_shape_tensor: true } '
            'input { name: "scale" data_type: TYPE_FP32 is_shape_tensor: true }',
            "its dims must be fixed",
        ),
        (
            '{ name: "x" data_type: TYPE_FP32 dims: [2, 3] is_shape_tensor: true } '
            'input { name: "scale" data_type: TYPE_FP32 is_shape_tensor: true }',
            "needs an input with rows",
        ),
    ],
)
def test_wrong_configurations_are_refused(load: Load, inputs: str, reason: str) -> None:
    with pytest.raises(StartError, match=reason):
        load(scaled, f"max_batch_size: 8 input {inputs}")


def test_a_model_with_shared_inputs_is_not_padded(load: Load, caplog: pytest.LogCaptureFixture) -> None:
    text = "(float[n, k] x, float scale) => (float[n, k] y) { y = Mul (x, scale) }"
    model = load(partial(written, text=text), pad_lengths=PadLengths("k", (4, 8)), pad_values=(("x", "0"),))
    assert model.padding is None
    assert "is not padded: it has an input without a batch axis" in caplog.text
