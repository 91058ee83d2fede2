"""A first axis fixed to 1 becomes variable only where the rows stay independent, and one row's answers stay the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from server.onnx.graph.build import model

from tensorferry.server.onnx.graph import analyse_batching
from tensorferry.server.onnx.graph.analysis import RowMixing
from tensorferry.server.onnx.graph.rewriting.changes import FreedRows, NewTarget, NotFreed, write_freed
from tensorferry.server.onnx.graph.rewriting.free_rows import free_rows


def i64(*numbers: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(numbers, np.int64)


def weights(*shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


# Constants that a graph has if its text names them.
CONSTANTS = {
    "token": weights(1, 1, 8),
    "token_shape": i64(1, 1, 8),
    "table": weights(4, 6),
    "row_of_24": i64(1, 24),
    "first": np.int64(0),
    "zero": i64(0),
    "ones": i64(1),
    "twos": i64(2),
    "fours": i64(4),
    "rest": i64(-1),
    "sizes": i64(1, 3, 8, 8),
    "flat": i64(4, 8),
    "back": i64(1, 4, 3),
    "row_of_8": i64(1, 8),
    "heads": i64(1, 4, 2, 4),
    "joined_heads": i64(1, -1, 8),
    "kernel": weights(2, 1, 3, 3),
    "dense": weights(8, 3),
    "w": weights(1, 32, 4),
    "r": weights(1, 32, 8),
    "b": weights(1, 64),
    "state": np.zeros((1, 1, 8), np.float32),
    "halves": i64(1, 1),
    "grid": np.random.default_rng(0).uniform(-1, 1, (1, 4, 4, 2)).astype(np.float32),
    "picked": i64(3, 0, -2).reshape(1, 3),
    "of_the_row": np.array([[[0, 3], [0, 0], [-1, -2]]]),
    "pairs": i64(2, 2, 8),
    "types": weights(1, 8),
    "split_pairs": i64(2, -1, 2, 8),
    "two_heads": i64(4, 2, 4),
    "steps_first": i64(4, 1, 3),
    "yes": np.array(True),
    "merged": i64(2, 4, 4),
    "apart": i64(1, 2, 4, 4),
    "positions": weights(2, 4, 4),
    "columns": np.random.default_rng(0).integers(0, 4, (2, 4, 4)),
    "second": i64(2),
    "two_rows": i64(2, 8),
    "row_of_pairs": i64(1, -1, 2),
    "row_of_fours": i64(1, -1, 4),
}

_LSTM = " => (float[1, 8] y) { steps, last = LSTM <hidden_size = 8> (x, w, r, b) y = Squeeze (last, zero) }"
_LARGER = "g (float[1, 4, 8] x) => (float[1, 5, 8] y)"
_DENSE = "g (float[1, 4, 8] x) => (float[1, 4, 3] y)"

# Each must be refused.
TRAPS = {
    "softmax over the rows": "g (float[1, 8] x) => (float[1, 8] y) { y = Softmax <axis = 0> (x) }",
    "squeeze drops the rows": _DENSE
    + " { s = Squeeze (x, zero) m = MatMul (s, dense) y = Unsqueeze (m, zero) }",
    "gather drops the rows": _DENSE
    + " { p = Gather <axis = 0> (x, first) m = MatMul (p, dense) y = Unsqueeze (m, zero) }",
    "constant state of one row": "g (float[5, 1, 4] x)" + _LSTM.replace("r, b)", "r, b, , state, state)"),
    "rows on axis 1 of a fixed sequence": "g (float[5, 1, 4] x)" + _LSTM,
    "sequence of length 1 on axis 0": "g (float[1, 1, 4] x)" + _LSTM,
    "a row expanded to two": "g (float[1, 8] x) => (float[2, 8] y) { y = Expand (x, two_rows) }",
    "output without rows": "g (float[1, 8] x) => (float[1, 1] y) { y = ReduceSum <keepdims = 1> (x) }",
    "rows compared with each other": "g (float[1, 8] x) => (float[1, 1] y) "
    "{ t = Transpose <perm = [1, 0]> (x) y = MatMul (x, t) }",
}

# Each must be proved.
FREE = {
    "steps of a loop, whose number is a scalar": "g (float[1, 3] x) => (float[1, 3] y) { y = Loop <body = "
    "b (int64 i, bool c, float[1, 3] h) => (bool d, float[1, 3] o) { d = Identity (c) o = Add (h, h) }> (second, yes, x) }",
    "convolution and flatten": "g (float[1, 1, 4, 4] x) => (float[1, 3] y) "
    "{ c = Conv (x, kernel) f = Reshape (c, row_of_8) y = MatMul (f, dense) }",
    "heads of attention": "g (float[1, 4, 8] x) => (float[1, 4, 8] y) { h = Reshape (x, heads) "
    "t = Transpose <perm = [0, 2, 1, 3]> (h) u = Transpose <perm = [0, 2, 1, 3]> (t) y = Reshape (u, joined_heads) }",
    "constant reshaped to one row, added": "g (float[1, 24] x) => (float[1, 24] y) "
    "{ c = Reshape (table, row_of_24) y = Add (x, c) }",
    "class token": _LARGER + " { y = Concat <axis = 1> (token, x) }",
    "class token, expanded to one row": _LARGER + " { e = Expand (token, token_shape) y = Concat <axis = 1> (e, x) }",
    "types of one row": "g (float[1, 8] x) => (float[1, 8] y) { i = ArgMax <axis = 1> (x) "
    "t = GatherElements <axis = 1> (types, i) y = Add (x, t) }",
    "grid of one row": "g (float[1, 1, 4, 4] x) => (float[1, 1, 4, 4] y) { y = GridSample (x, grid) }",
    "states of one row": "g (float[1, 5, 4] x) => (float[1, 8] y) { t = Transpose <perm = [1, 0, 2]> (x) "
    "steps, last = LSTM <hidden_size = 8> (t, w, r, b, , state, state) y = Squeeze (last, zero) }",
    "resize to sizes": "g (float[1, 3, 4, 4] x) => (float[1, 3, 8, 8] y) "
    '{ y = Resize <mode = "nearest"> (x, , , sizes) }',
    "reshape drops the rows": _DENSE + " { f = Reshape (x, flat) m = MatMul (f, dense) y = Reshape (m, back) }",
    "channels in turn": "g (float[1, 4, 8] x) => (float[1, 2, 8] y) { s = Reshape (x, pairs) "
    "t = Transpose <perm = [1, 0, 2]> (s) p = Reshape (t, split_pairs) y = Gather <axis = 0> (p, first) }",
    "rows merged with heads, then with steps": "g (float[1, 4, 8] x) => (float[1, 4, 3] y) "
    "{ t = Transpose <perm = [1, 0, 2]> (x) h = Reshape (t, two_heads) u = Transpose <perm = [1, 0, 2]> (h) "
    "k = Transpose <perm = [0, 2, 1]> (u) a = MatMul (u, k) z = MatMul (a, u) v = Transpose <perm = [1, 0, 2]> (z) "
    "f = Reshape (v, flat) m = MatMul (f, dense) s = Reshape (m, steps_first) y = Transpose <perm = [1, 0, 2]> (s) }",
    "target in which 0 would be a size": "g (float[1, 1, 4, 4] x) => (float[1, 3] y) "
    "{ c = Conv (x, kernel) f = Reshape <allowzero = 1> (c, row_of_8) y = MatMul (f, dense) }",
    "target that callers may set": "g (float[1, 1, 4, 4] x, int64[2] target = {1, 8}) => (float[1, 3] y) "
    "{ c = Conv (x, kernel) f = Reshape (c, target) y = MatMul (f, dense) }",
    "elements of merged rows": "g (float[1, 4, 8] x) => (float[1, 3, 8] y) "
    "{ f = Reshape (x, flat) y = Gather (f, picked) }",
    "positions of heads, as DeBERTa has them": "g (float[1, 4, 8] x) => (float[1, 2, 4, 4] y) { h = Reshape (x, heads) "
    "t = Transpose <perm = [0, 2, 1, 3]> (h) m = Reshape (t, merged) a = MatMul (m, positions) "
    "e = GatherElements <axis = 2> (a, columns) y = Reshape (e, apart) }",
    "sums of windows, expanded": "g (float[1, 4, 8] x) => (float[1, 2, 4, 4] y) { h = Reshape (x, heads) "
    "t = Transpose <perm = [0, 2, 1, 3]> (h) m = Reshape (t, merged) s = ReduceSum <keepdims = 1> (m, second) "
    "e = Expand (s, merged) d = Sub (m, e) y = Reshape (d, apart) }",
    "mask at pairs of indices": "g (float[1, 4, 8] x) => (float[1, 3, 8] y) { y = GatherND (x, of_the_row) }",
    "two inputs": "g (float[1, 3] x, float[1, 3] z) => (float[1, 3] y) { y = Add (x, z) }",
    "target with the number of rows": "g (float[1, 4, 2, 4] x) => (float[1, 32] y) { s = Shape <start = 0, end = 1> (x) "
    "n = Mul (s, twos) target = Concat <axis = 0> (n, rest, fours) h = Reshape (x, target) "
    "own = Concat <axis = 0> (s, rest) y = Reshape (h, own) }",
    "target with a size of the input": "g (float[1, n, 8] x) => (float[1, n, 2, 4] y) { s = Shape <start = 1, end = 2> (x) "
    "target = Concat <axis = 0> (ones, s, twos, fours) y = Reshape (x, target) }",
}  # fmt: skip


def saved(folder: Path, text: str) -> Path:
    onnx.save(model(text, 17, CONSTANTS), folder / "m.onnx")
    return folder / "m.onnx"


def freed_file(path: Path, target: Path) -> Path:
    write_freed(path, free_rows(path), target)
    return target


@pytest.mark.parametrize("name", TRAPS)
def test_a_graph_whose_rows_would_mix_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(NotFreed) as refused:
        free_rows(saved(tmp_path, TRAPS[name]))
    assert refused.value.reasons


@pytest.mark.parametrize("name", FREE)
def test_rows_together_get_the_answers_of_the_file(name: str, tmp_path: Path) -> None:
    path = saved(tmp_path, FREE[name])
    target = freed_file(path, tmp_path / "free.onnx")
    own, free = onnxruntime.InferenceSession(path), onnxruntime.InferenceSession(target)
    generator = np.random.default_rng(1)
    inputs = {}
    for one in own.get_inputs():
        shape = [3, *(5 if isinstance(size, str) else size for size in one.shape[1:])]
        inputs[one.name] = generator.standard_normal(shape).astype(np.float32)
    (together,) = free.run(None, inputs)
    for at in range(3):
        row = {name: array[at : at + 1] for name, array in inputs.items()}
        for answer in (together[at : at + 1], free.run(None, row)[0]):
            np.testing.assert_allclose(answer, own.run(None, row)[0], rtol=1e-6)


def test_targets_are_changed_only_where_the_graph_is_not_proved_without(tmp_path: Path) -> None:
    assert free_rows(saved(tmp_path, FREE["constant reshaped to one row, added"])) == FreedRows(("x",))
    freed = free_rows(saved(tmp_path, FREE["heads of attention"]))
    assert freed.nodes == (NewTarget("h", (0, 4, 2, 4)), NewTarget("y", (0, -1, 8)))


def test_what_callers_may_set_is_fixed_only_where_the_graph_is_not_proved_without(tmp_path: Path) -> None:
    assert free_rows(saved(tmp_path, FREE["target that callers may set"])).keeps_defaults
    weights_too = "g (float[1, 3] x, float[1] w = {2}) => (float[1, 3] y) { y = Mul (x, w) }"
    assert free_rows(saved(tmp_path, weights_too)) == FreedRows(("x",))


def test_targets_that_are_constant_but_for_the_rows_are_not_computed_in_each_run(tmp_path: Path) -> None:
    """ONNX Runtime computes them once for the file, because its shapes are fixed."""
    path = saved(tmp_path, FREE["target with the number of rows"])
    assert free_rows(path).nodes == (NewTarget("h", (-1, 4, 4)), NewTarget("y", (-1, 32)))
    freed = onnx.load(freed_file(path, tmp_path / "free.onnx"))
    assert [one.op_type for one in freed.graph.node] == ["Reshape", "Reshape"]


def test_the_nodes_of_a_file_may_be_unsorted(tmp_path: Path) -> None:
    """ONNX Runtime's FP16 converter writes such files."""
    path = saved(tmp_path, FREE["convolution and flatten"])
    unsorted = onnx.load(path)
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in reversed(unsorted.graph.node)]
    del unsorted.graph.node[:]
    unsorted.graph.node.extend(nodes)
    onnx.save(unsorted, path)
    free = onnxruntime.InferenceSession(freed_file(path, tmp_path / "free.onnx"))
    assert free.run(None, {"x": np.ones((3, 1, 4, 4), np.float32)})[0].shape == (3, 3)


def test_shapes_of_inner_tensors_and_graphs_are_left_out(tmp_path: Path) -> None:
    """They say that there is one row, which is not so."""
    path = saved(
        tmp_path,
        """g (float[1, 3] x) => (float[1, 3] y) <float[1, 3] a> { a = Add (x, x) y = If (yes) <
            then_branch = p () => (float[1, 3] n) { n = Neg (a) },
            else_branch = q () => (float[1, 3] m) { m = Abs (a) }> }""",
    )
    target = freed_file(path, tmp_path / "free.onnx")
    assert analyse_batching(target, ["x"]).finding is RowMixing.SEPARATE
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(onnxruntime.InferenceSession(target).run(None, {"x": x})[0], -2 * x)


def test_weights_outside_the_models_folder_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, FREE["convolution and flatten"])
    read = onnx.load(path)
    tensor = read.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../secret")
    onnx.save(read, path)
    with pytest.raises(NotFreed, match=r"'\.\./secret' is outside"):
        write_freed(path, FreedRows(("x",)), tmp_path / "free.onnx")


def test_a_file_that_cannot_be_read_or_that_protobuf_cannot_hold_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    with pytest.raises(NotFreed, match="cannot be read"):
        free_rows(path)
    with path.open("wb") as file:
        file.truncate(2**31)
    with pytest.raises(NotFreed, match="larger than 2 GB"):
        free_rows(path)


def test_the_axis_has_a_name_of_its_own(tmp_path: Path) -> None:
    path = saved(tmp_path, "g (float[1, batch] x) => (float[1, batch] y) { y = Neg (x) }")
    freed = onnx.load(freed_file(path, tmp_path / "free.onnx"))
    dims = [dim.dim_param for dim in freed.graph.input[0].type.tensor_type.shape.dim]
    assert dims == ["batch_", "batch"]
