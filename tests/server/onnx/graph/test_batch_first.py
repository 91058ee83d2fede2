"""Tensors whose batch axis is not their first: the analysis chooses the axes, and Transposes move them to the front."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from server.onnx.graph.test_free_rows import TRAPS, saved, weights

from tensorferry.server.onnx.graph.rewriting.batch_first import batch_first as batch_first_in_time
from tensorferry.server.onnx.graph.rewriting.changes import FreedRows, MovedAxis, NotFreed, write_freed

REFUSED = {
    "softmax over the rows": TRAPS["softmax over the rows"],
    "output without rows": TRAPS["output without rows"],
    "no axis is the first of one input": "g (float[2, ?] x, float[2, ?] z) => (float[2, ?] y) { y = Add (x, z) }",
    "its batch axis is the first": "g (float[batch, 3] x) => (float[batch, 3] y) { y = Neg (x) }",
    "a target that depends on a length": """g (float[length, 1, 4] x) => (float[1, 1] y) {
        turned = Transpose <perm = [1, 0, 2]> (x) shape = Shape <end = 1> (x) long = Greater (shape, fours) target = If (long) <
            then_branch = a () => (int64[3] p) { p = Identity (row_of_pairs) },
            else_branch = b () => (int64[3] f) { f = Identity (row_of_fours) }>
        cut = Reshape (turned, target) most = ReduceMax <axes = [1], keepdims = 0> (cut)
        y = ReduceSum <keepdims = 1> (most, ones)
    }""",
    # The Transpose of its output would fail for the other lengths, which the file takes.
    "a rank that depends on a length": """g (float[length, 1, 4] x) => (float[?, ?, ?] y) {
        shape = Shape <end = 1> (x) long = Greater (shape, fours) y = If (long) <
            then_branch = a () => (float[?, ?, ?] squares) { squares = Mul (x, x) },
            else_branch = b () => (float[?, ?] sums) { sums = ReduceSum <keepdims = 0> (x, second) }>
    }""",
}
_BRANCHES = ", ".join(
    f"{name} = {name} () => (float[1, 1, 8] {name}) {{ all_{name}, {name} = LSTM <hidden_size = 8> (x, w, r) }}"
    for name in ("then_branch", "else_branch")
)
# Graphs x [5, 1, 4] → y with the axis of its rows.
MOVED = {
    "rows behind a fixed sequence": (TRAPS["rows on axis 1 of a fixed sequence"], 0),
    "states of one row": (TRAPS["constant state of one row"], 0),
    "a graph inside a node": (
        f"g (float[5, 1, 4] x) => (float[1, 1, 8] y) {{ y = If (yes) <{_BRANCHES}> }}",
        1,
    ),
}


def batch_first(path: Path) -> FreedRows:
    return batch_first_in_time(path, lambda: True)


def streaming(folder: Path, rows: int | str = 1) -> Path:
    """The batch axis has this size or name. x [rows, 4] and state [2, rows, 8] → y [3, rows, 8] and the next state [2, rows, 8], by an LSTM as silero-vad has it."""
    rows = rows or "?"
    return saved(
        folder,
        f"g (float[{rows}, 4] x, float[2, {rows}, 8] past) => (float[3, {rows}, 8] y, float[2, {rows}, 8] next) {{"
        "h, c = Split <axis = 0> (past, halves) steps = Unsqueeze (x, zero) "
        "steps_h, h2, c2 = LSTM <hidden_size = 8> (steps, w, r, b, , h, c) "
        "next = Concat <axis = 0> (h2, c2) y = Concat <axis = 0> (h2, c2, h) }",
    )


@pytest.mark.parametrize("rows", [1, "batch", ""])
def test_rows_together_get_the_answers_of_the_file(rows: int | str, tmp_path: Path) -> None:
    path = streaming(tmp_path, rows)
    moved = batch_first(path)
    assert moved.axes == (MovedAxis("past", 1, 3), MovedAxis("y", 1, 3), MovedAxis("next", 1, 3))
    write_freed(path, moved, tmp_path / "first.onnx")
    own = onnxruntime.InferenceSession(path)
    first = onnxruntime.InferenceSession(tmp_path / "first.onnx")
    assert [one.shape[1:] for one in first.get_inputs()] == [[4], [2, 8]]
    x, state = weights(5, 4), weights(5, 2, 8)
    got = first.run(["y", "next"], {"x": x, "past": state})
    for at in range(5):
        inputs = {"x": x[at : at + 1], "past": np.moveaxis(state[at : at + 1], 0, 1)}
        for whole, right in zip(got, own.run(["y", "next"], inputs), strict=True):
            np.testing.assert_allclose(np.moveaxis(whole[at : at + 1], 0, 1), right, rtol=1e-5, atol=1e-6)


def test_an_output_may_be_declared_with_another_rank(tmp_path: Path) -> None:
    """ddddocr's recognition declares [1, n] for [n, 1, classes]."""
    path = streaming(tmp_path)
    model = onnx.load(path)
    dims = model.graph.output[0].type.tensor_type.shape.dim
    del dims[1:]
    dims.add(dim_param="n")
    onnx.save(model, path)
    moved = batch_first(path)
    assert MovedAxis("y", 1, 3) in moved.axes
    write_freed(path, moved, tmp_path / "first.onnx")
    declared = onnx.load(tmp_path / "first.onnx").graph.output[0]
    assert len(declared.type.tensor_type.shape.dim) == 3


@pytest.mark.parametrize("case", MOVED)
def test_rows_of_a_fixed_sequence_get_the_answers_of_the_file(case: str, tmp_path: Path) -> None:
    text, axis = MOVED[case]
    path = saved(tmp_path, text)
    moved = batch_first(path)
    assert moved.axes == (MovedAxis("x", 1, 3), *([MovedAxis("y", axis, 3)] if axis else []))
    write_freed(path, moved, tmp_path / "first.onnx")
    x = weights(3, 5, 4)
    (got,) = onnxruntime.InferenceSession(tmp_path / "first.onnx").run(None, {"x": x})
    own = onnxruntime.InferenceSession(path)
    right = [np.moveaxis(own.run(None, {"x": row[:, None]})[0], axis, 0) for row in x]
    np.testing.assert_allclose(got, np.concatenate(right), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", REFUSED)
def test_a_graph_whose_rows_would_mix_or_that_needs_no_change_is_refused(case: str, tmp_path: Path) -> None:
    with pytest.raises(NotFreed):
        batch_first(saved(tmp_path, REFUSED[case]))
