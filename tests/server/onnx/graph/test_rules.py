"""The rules find whether small graphs keep rows separate, mix them, or have an unknown effect."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import external_data_helper
from server.onnx.graph.build import analysed, model, rows_stay_apart

from tensorferry.server.onnx.graph import RowMixing, analyse_batching

_C = "= Constant <value_ints = "

SEPARATE = {
    "softmax of a row": "y = Softmax <axis = -1> (x)",
    "merged and split again": f"a {_C}[-1, 4]> () b {_C}[-1, 3, 4]> () m = Reshape (x, a) w = Softmax (m) y = Reshape (w, b)",
    "moved to another axis and back": "t = Transpose <perm = [1, 2, 0]> (x) r = Relu (t) y = Transpose <perm = [2, 0, 1]> (r)",
    "copies joined and split": "j = Concat <axis = 0> (x, x) r = Relu (j) y, z = Split <axis = 0, num_outputs = 2> (r)",
    "layer normalisation of Keras, by BatchNormalization with the rows as channels": (
        f"z {_C}[0]> () o {_C}[1]> () t {_C}[1, -1, 4, 1]> () v = Constant <value_floats = [1.0]> () s = Shape (x) "
        "n = Slice (s, z, o) three = Constant <value_ints = [3]> () c = Mul (n, three) k = Expand (v, c) r = Reshape (x, t) "
        f"a {_C}[0, 2, 3]> () m = ReduceMean <keepdims = 0> (r, a) q = ReduceSumSquare <keepdims = 0> (r, a) "
        "b = BatchNormalization (r, k, m, m, q) y = Reshape (b, s)"
    ),
    "positions repeated for the heads of each row, as DeBERTa does": (
        f"i {_C}[0, 1, 2, 3, 4, 5, 6, 7]> () t {_C}[2, 2, 2]> () p = Reshape (i, t) k = Cast <to = 1> (p) s = Shape (x) "
        f"z {_C}[0]> () o {_C}[1]> () n = Slice (s, z, o) one {_C}[1, 1]> () r = Concat <axis = 0> (n, one) "
        f"w = Tile (k, r) h {_C}[-1, 2, 3]> () m = Reshape (x, h) a = MatMul (w, m) b {_C}[-1, 3, 4]> () y = Reshape (a, b)"
    ),
    "halves of a constant": f"c {_C}[4, 1, 2, 3]> () a, b = Split <axis = 0, num_outputs = 2> (c) k = Cast <to = 1> (b) "
    "n = ReduceSum <keepdims = 0> (k) y = Mul (x, n)",
    "a target of a constant's half": f"c {_C}[9, 9, 9, 0, 4, 3]> () a, b = Split <axis = 0, num_outputs = 2> (c) y = Reshape (x, b)",
    "each row turned round up to its own length": "n = ArgMax <axis = 1, keepdims = 0> (x) "
    "o = Constant <value_ints = [1]> () m = ReduceMax <keepdims = 0> (n, o) l = Add (m, o) "
    "y = ReverseSequence <batch_axis = 0, time_axis = 1> (x, l)",
    "elements put into each row": "i = ArgMax <axis = 2> (x) f = Cast <to = 1> (i) y = ScatterElements <axis = 2> (x, i, f)",
    "a scalar of a constant": "c = Constant <value_float = 2.0> () y = Mul (x, c)",
    "a sum of products": 'y = Einsum <equation = "bij,bkj->bik"> (x, x)',
    "a shape from the number of rows": f"s = Shape (x) o = ConstantOfShape (s) y = Add (x, o) z {_C}[1]> ()",
    "every second column of the whole batch, as tf2onnx writes it": f"b {_C}[0, 0]> () e {_C}[1000000000, 1000000000]> () "
    f"a {_C}[0, 1]> () s {_C}[1, 2]> () y = Slice (x, b, e, a, s)",
    "the whole batch sliced": f"a {_C}[0]> () e {_C}[9223372036854775807]> () y = Slice (x, a, e, a)",
    "a loop over the positions": "n = Constant <value_int = 3> () c = Constant <value_int = 1> () b = Cast <to = 9> (c) "
    "y = Loop <body = g (int64 i, bool d, float[N, 3, 4] h) => (bool d2, float[N, 3, 4] o) "
    "{ d2 = Identity (d) o = Relu (h) }> (n, b, x)",
    "a scan over the positions": "t = Transpose <perm = [1, 0, 2]> (x) "
    "u = Scan <num_scan_inputs = 1, body = g (e) => (o) { o = Relu (e) }> (t) y = Transpose <perm = [1, 0, 2]> (u)",
    "one branch or another of a constant": "c = Constant <value_int = 1> () b = Cast <to = 9> (c) "
    "y = If <then_branch = a () => (p) { p = Relu (x) }, else_branch = e () => (q) { q = ReduceMax <keepdims = 1> (x) }> (b)",
    "a function of the model": "y = local.Apart (x)",
}

MIXED = {
    "a maximum of the batch": ("m = ReduceMax <keepdims = 0> (x) y = Sub (x, m)", "ReduceMax m reduces over the batch axis"),
    "softmax over the batch": ("y = Softmax <axis = 0> (x)", "Softmax y normalises over the batch axis"),
    "the last row": ("i = Constant <value_int = -1> () g = Gather (x, i) y = Add (x, g)", "Gather g picks elements along the batch axis"),
    "another order": (f"a {_C}[-1]> () e {_C}[-9223372036854775807]> () z {_C}[0]> () y = Slice (x, a, e, z, a)", "Slice y takes a part of the batch axis"),
    "batch normalisation with the rows as channels of a table": (f"t {_C}[1, -1, 4, 1]> () v = Constant <value_floats = [1.0, 2.0, 3.0]> () r = Reshape (x, t) y = BatchNormalization (r, v, v, v, v)", "BatchNormalization y has statistics along the batch axis"),
    "rows split differently": (f"a {_C}[2, -1]> () m = Reshape (x, a) y = Softmax (m)", "Reshape m splits the batch axis across rows"),
    "all pairs of rows": ('y = Einsum <equation = "aij,bij->ab"> (x, x)', "Einsum y multiplies rows along one axis with rows along another"),
    "the number of rows": ("s = Shape <start = 0, end = 1> (x) f = Cast <to = 1> (s) y = Div (x, f)", "Div y makes the rows' values depend on the number of rows in the batch"),
    "no rows at all": ("c = Constant <value_float = 2.0> () y = Identity (c)", "output y does not follow the batch axis: it is the same for all rows"),
    "rows on another axis": ("y = Transpose <perm = [1, 0, 2]> (x)", "output y does not follow the batch axis: the rows are on its axis 1"),
    "several for each row": (f"a {_C}[-1, 4]> () y = Reshape (x, a)", "output y does not follow the batch axis: its axis 0 has the size 3*rows"),
    "padded": (f"p {_C}[0, 0, 0, 1, 0, 0]> () y = Pad (x, p)", "Pad y pads the batch axis"),
    "in a branch": ("c = Constant <value_int = 0> () b = Cast <to = 9> (c) "
                    "y = If <then_branch = a () => (p) { p = Relu (x) }, else_branch = e () => (q) { m = ReduceMax <keepdims = 1> (x) q = Add (x, m) }> (b)", "ReduceMax m reduces over the batch axis"),
    "in a loop, from one iteration to the next": ("n = Constant <value_int = 3> () c = Constant <value_int = 1> () b = Cast <to = 9> (c) "
              "y = Loop <body = g (int64 i, bool d, float[N, 3, 4] h) => (bool d2, float[N, 3, 4] o) { d2 = Identity (d) m = ReduceMax <keepdims = 1> (h) o = Add (h, m) }> (n, b, x)", "ReduceMax m reduces over the batch axis"),
    "in a function": ("y = local.Mixed (x)", "ReduceMax m reduces over the batch axis"),
    "scanned over the batch": ("z = Constant <value_float = 0.0> () e, y = Scan <num_scan_inputs = 1, body = g (h, e) => (h2, o) { m = ReduceMax <keepdims = 0> (e) h2 = Max (h, m) o = Sub (e, h2) }> (z, x)", "Scan e runs along the batch axis"),
}  # fmt: skip

UNKNOWN = {
    "a custom operator": ("y = com.acme.Foo (x)", "com.acme.Foo y is an operator that cannot be analysed"),
    "a custom operator with a graph that reads rows": ("k = Constant <value_float = 1.0> () f = com.acme.Foo <body = g () => (z) { z = Relu (x) }> (k) y = Add (x, f)", "com.acme.Foo f is an operator that cannot be analysed"),
    "lengths that have no rows": (f"l {_C}[2, 2, 2]> () y = ReverseSequence <batch_axis = 0, time_axis = 1> (x, l)", "ReverseSequence y takes lengths that have no rows"),
    "elements of rows put among others": (f"i {_C}[0]> () j = Reshape (i, t) t {_C}[1, 1, 1]> () u = Cast <to = 1> (j) y = ScatterElements <axis = 2> (x, j, u)", "ScatterElements y puts elements of rows among elements that have none"),
    "a bias with rows in another order": (f"z {_C}[-1, 4, 1]> () q = Reshape (x, z) t = Transpose <perm = [0, 2, 1]> (x) s = MatMul (t, x) o {_C}[1]> () "
        "u = Unsqueeze (s, o) b = Concat <axis = 0> (u, u, u) y = com.microsoft.MultiHeadAttention <num_heads = 1> (q, q, q, , , b)",
        "com.microsoft.MultiHeadAttention y combines rows that are merged with other axes in different ways"),
    "each row's own index, into another axis": (f"o {_C}[1]> () t = Transpose <perm = [1, 0, 2]> (x) s = Shape <end = 1> (x) n = Squeeze (s) z = Constant <value_int = 0> () "
        "a = Constant <value_int = 1> () r = Range (z, n, a) i = Unsqueeze (r, o) j = Concat <axis = -1> (i) y = GatherND <batch_dims = 1> (t, j)",
        "GatherND y depends on the indices of rows in the batch"),
    "a size that depends on values": ("n = NonZero (x) y = Cast <to = 1> (n)", "NonZero n computes a shape that depends on the rows' values"),
    "squeezed without axes": ("y = Squeeze (x)", "Squeeze y removes the batch axis if there is one row"),
    "squeezed by an empty list": ("a = Constant <value = int64[0] {}> () y = Squeeze (x, a)",
        "Squeeze y removes the batch axis if there is one row"),
    "a zero point for each column, if rows are columns": (f"o {_C}[1]> () m = ReduceMax <keepdims = 0> (x, o) t = Transpose <perm = [1, 0]> (m) "
        "a = Constant <value = float {0.1}> () p = Constant <value = uint8 {3}> () q = QuantizeLinear (t, a, p) w = Constant <value = uint8[2, 4] {1, 2, 3, 4, 5, 6, 7, 8}> () "
        "c = Constant <value = uint8[3] {3, 4, 5}> () y = MatMulInteger (w, q, p, c)", "MatMulInteger y has scales or zero points along the batch axis"),
    "a zero point for each row": (f"o {_C}[1]> () m = ReduceMax <keepdims = 0> (x, o) a = Constant <value = float {{0.1}}> () p = Constant <value = uint8 {{3}}> () "
        "q = QuantizeLinear (m, a, p) w = Constant <value = uint8[4, 2] {1, 2, 3, 4, 5, 6, 7, 8}> () "
        "c = Constant <value = uint8[3] {3, 4, 5}> () y = MatMulInteger (q, w, c, p)", "MatMulInteger y has scales or zero points along the batch axis"),
    "row indices": ("s = Shape <start = 0, end = 1> (x) n = Squeeze (s) z = Constant <value_int = 0> () o = Constant <value_int = 1> () "
                     "r = Range (z, n, o) f = Cast <to = 7> (r) y = Neg (f)", "Neg y depends on the indices of rows in the batch"),
}  # fmt: skip

_FUNCTIONS = """
<domain: "local", opset_import: ["" : 21]> Apart (a) => (b) { c = Softmax <axis = -1> (a) b = Relu (c) }
<domain: "local", opset_import: ["" : 21]> Mixed (a) => (b) { m = ReduceMax <keepdims = 1> (a) b = Sub (a, m) }
"""


def _graph(body: str) -> str:
    return f"g (float[N, 3, 4] x) => (float[N] y) {{ {body} }} {_FUNCTIONS}"


@pytest.mark.parametrize("case", SEPARATE)
def test_rows_are_separate(tmp_path: Path, case: str) -> None:
    found = analysed(tmp_path, _graph(SEPARATE[case]))
    assert found.finding is RowMixing.SEPARATE, found.reasons
    assert rows_stay_apart(tmp_path / "m.onnx", 3, 4)


@pytest.mark.parametrize("case", MIXED)
def test_rows_are_mixed(tmp_path: Path, case: str) -> None:
    body, reason = MIXED[case]
    found = analysed(tmp_path, _graph(body))
    assert found.finding is RowMixing.MIXES, found.reasons
    assert found.reasons[0].startswith(reason)
    assert not rows_stay_apart(tmp_path / "m.onnx", 3, 4)


@pytest.mark.parametrize("case", UNKNOWN)
def test_the_effect_is_unknown(tmp_path: Path, case: str) -> None:
    body, reason = UNKNOWN[case]
    found = analysed(tmp_path, _graph(body))
    assert found.finding is RowMixing.UNKNOWN, found.reasons
    assert found.reasons[0].startswith(reason)


def test_softmax_before_opset_13_is_over_an_axis_and_all_later_axes(tmp_path: Path) -> None:
    text = "g (float[N, 3, 4] x) => (float[N, 3, 4] y) { y = Softmax <axis = 0> (x) }"
    assert analysed(tmp_path, text, opset=11).finding is RowMixing.MIXES
    moved = (
        "g (float[N, 3, 4] x) => (float[N, 3, 4] y) { t = Transpose <perm = [1, 0, 2]> (x) "
        "s = Softmax <axis = 1> (t) y = Transpose <perm = [1, 0, 2]> (s) }"
    )
    assert analysed(tmp_path, moved, opset=11).finding is RowMixing.MIXES
    assert analysed(tmp_path, moved.replace("axis = 1", "axis = 2"), opset=11).finding is RowMixing.SEPARATE


def test_a_reshape_may_leave_out_a_size_that_must_be_one(tmp_path: Path) -> None:
    """PP-OCRv4's recognition does so with the height, which is 1 behind its last pooling."""

    def reshaped(*target: str) -> RowMixing:
        numbers = {"zero": 0, "one": 1, "two": 2, "three": 3, "four": 4, "eight": 8}
        constants = " ".join(f"{name} {_C}[{number}]> ()" for name, number in numbers.items())
        text = (
            f"g (float[N, 8, H, W] x) => (float[N] y) {{ {constants} flat {_C}[0, 8, -1]> () s = Shape (x) "
            "n = Slice (s, zero, one) w = Slice (s, three, four) c = Reshape (x, flat) t = Transpose <perm = [0, 2, 1]> (c) "
            f"to = Concat <axis = 0> ({', '.join(target)}) y = Reshape (t, to) }}"
        )
        return analysed(tmp_path, text).finding

    assert reshaped("zero", "one", "w", "eight") is RowMixing.SEPARATE
    assert reshaped("n", "w", "eight") is RowMixing.SEPARATE
    # The rows are not behind as many elements as before.
    assert reshaped("w", "n", "eight") is RowMixing.UNKNOWN
    assert reshaped("two", "n", "w", "four") is RowMixing.UNKNOWN


def test_an_input_without_rows_is_the_same_for_all_rows(tmp_path: Path) -> None:
    text = "g (float[N, 3] x, float scale, float[M, 3] other) => (float[N, 3] y) { y = Mul (x, scale) }"
    assert analysed(tmp_path, text).finding is RowMixing.SEPARATE
    assert analysed(tmp_path, text.replace("scale)", "other)")).finding is RowMixing.UNKNOWN


def test_a_part_of_the_rows_by_steps_that_are_computed_at_run_time_is_unknown(tmp_path: Path) -> None:
    text = (
        f"g (float[N, 4] x, int64[1] step) => (float[N, 4] y) {{ z {_C}[0]> () e {_C}[9223372036854775807]> () "
        "p = Slice (x, z, e, z, step) s = Shape (x) w = Expand (p, s) y = Add (x, w) }"
    )
    assert analysed(tmp_path, text).finding is RowMixing.UNKNOWN


# What ONNX Runtime computes otherwise than one would expect.
AS_ONNX_RUNTIME = {
    "weights of 0 for other rows": (
        "float[N, 3, 8] x",
        'c = Constant <value_floats = [1.0, 1.0, 2.0]> () y = Resize <mode = "linear"> (x, , c)',
        RowMixing.MIXES,
    ),
    "rows that are left out by its interpolation": (
        "float[N, 3, 8, 8] x",
        'c = Constant <value_floats = [1.0, 1.0, 2.0, 2.0]> () y = Resize <mode = "linear"> (x, , c)',
        RowMixing.SEPARATE,
    ),
    "a size of 13 by 32 bits, and of 12 by 64": (
        "float[N, 3, 10, 10] x",
        "c = Constant <value_floats = [1.0, 1.0, 1.3, 1.3]> () r = Resize (x, , c) "
        f"t {_C}[-1, 507]> () y = Reshape (r, t)",
        RowMixing.SEPARATE,
    ),
    "all elements backwards to the largest integer": (
        "float[N, 3] x",
        f"a {_C}[0]> () m {_C}[-1]> () e {_C}[2147483647]> () z {_C}[0]> () "
        "i = Slice (a, m, e, z, m) y = ReduceMean <noop_with_empty_axes = 1> (x, i)",
        RowMixing.MIXES,
    ),
    "windows of a dilated pool": (
        "float[N, 1, 11] x",
        'p = MaxPool <kernel_shape = [2], auto_pad = "SAME_UPPER", dilations = [2]> (x) '
        f"t {_C}[-1, 11]> () y = Reshape (p, t)",
        RowMixing.UNKNOWN,
    ),
    "0 divided by 0": (
        "float[N, 3] x",
        "s = Shape <start = 0, end = 1> (x) k = Constant <value_ints = [17]> () m = Mod (s, k) f = Cast <to = 1> (m) "
        "q = Div (f, f) y = Mul (x, q)",
        RowMixing.MIXES,
    ),
    "a size of 1 that is broadcast": (
        "float[N, S, 2, 4] x, float[N, T, 4, 5] z",
        "p = MatMul (x, z) a = Shape <start = 1, end = 2> (p) b = Shape <start = 1, end = 2> (x) d = Sub (a, b) "
        f"o {_C}[1]> () i = Add (d, o) y = ReduceMean (x, i)",
        RowMixing.UNKNOWN,
    ),
    "a bias as long as the last axis": (
        "float[N] x",
        "b = Constant <value_floats = [1.0]> () y = com.microsoft.BiasGelu (x, b)",
        RowMixing.MIXES,
    ),
    "an optional bias as long as the last axis": (
        "float[N] x",
        "b = Constant <value_floats = [1.0]> () y = com.microsoft.FastGelu (x, b)",
        RowMixing.MIXES,
    ),
}


@pytest.mark.parametrize("case", AS_ONNX_RUNTIME)
def test_sizes_and_numbers_are_those_of_onnx_runtime(case: str, tmp_path: Path) -> None:
    inputs, nodes, finding = AS_ONNX_RUNTIME[case]
    found = analysed(tmp_path, f"g ({inputs}) => (float y) {{ {nodes} }}", re.findall(r"] (\w)", inputs))
    assert found.finding is finding, found.reasons


@pytest.mark.parametrize("axis", [0, 2])
def test_small_external_constants_are_read_and_large_weights_are_not(tmp_path: Path, axis: int) -> None:
    text = "g (float[N, 3, 4] x) => (float[N] s, float[N] m) { s = ReduceSum (x, axes) m = MatMul (x, w) }"
    made = model(text, constants={"w": np.ones((4, 2000), np.float32), "axes": np.array([axis])})
    external_data_helper.convert_model_to_external_data(made, location="data.bin", size_threshold=0)
    onnx.save(made, str(tmp_path / "m.onnx"))
    wanted = RowMixing.SEPARATE if axis else RowMixing.MIXES
    assert analyse_batching(tmp_path / "m.onnx", ["x"]).finding is wanted
    (tmp_path / "data.bin").unlink()
    (tmp_path / "m.onnx").touch()
    assert analyse_batching(tmp_path / "m.onnx", ["x"]).finding is RowMixing.UNKNOWN


def test_the_analysis_of_hostile_graphs_is_bounded(tmp_path: Path) -> None:
    doubling = " ".join(f"a{at + 1} = Mul (a{at}, a{at})" for at in range(60))
    numbers = f"s = Shape (x) a0 = Identity (s) {doubling} y = Reshape (x, a60)"
    assert analysed(tmp_path, _graph(numbers)).finding is RowMixing.UNKNOWN
    functions = " ".join(
        f'<domain: "local", opset_import: ["" : 21, "local" : 1]> F{at} (a) => (b) '
        f"{{ c = local.F{at + 1} (a) b = local.F{at + 1} (c) }}"
        for at in range(30)
    )
    last = '<domain: "local", opset_import: ["" : 21]> F30 (a) => (b) { b = Relu (a) }'
    found = analysed(
        tmp_path, f"g (float[N, 3] x) => (float[N, 3] y) {{ y = local.F0 (x) }} {functions} {last}"
    )
    assert found.finding is RowMixing.UNKNOWN
    assert "100000 nodes" in found.reasons[0]
