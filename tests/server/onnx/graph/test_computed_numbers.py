"""Graphs that mix rows by numbers that they compute, or by the function that a name stands for, are never proved."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from server.onnx.graph.build import analysed, model, rows_stay_apart

from tensorferry.server.onnx.graph import RowMixing, analyse_batching

_COUNT = """s = Shape <start = 0, end = 1> (x) zero = Constant <value_ints = [0]> () one = Constant <value_ints = [1]> ()
    two = Constant <value_ints = [2]> () last = Constant <value_ints = [-1]> () n = Squeeze (s, zero) low = Constant <value_int = 1> ()
    high = Constant <value_int = 3> () few = Clip (n, low, high) few1 = Unsqueeze (few, zero) """

# `few` depends on the number of rows, as the analysis does not follow Clip.
BY_NUMBER_OF_ROWS = {
    "the greatest few": "v, i = TopK <axis = 1> (x, few1) y = ReduceSum (v, one)",
    "the first few": "v = Slice (x, zero, few1, one) y = ReduceSum (v, one)",
    "as many classes": "c = Constant <value_floats = [0.0, 1.0]> () i = Cast <to = 7> (x) o = OneHot (i, few, c) "
    "y = ReduceSum <keepdims = 0> (o, last)",
    "a window as long": "w = HannWindow (few) q = ReduceSum <keepdims = 0> (w) y = Add (x, q)",
    "a window of that many rows": "w = HannWindow (n) q = ReduceSum <keepdims = 0> (w) y = Add (x, q)",
    "a transform as long": "a = Constant <value_int = 1> () u = Unsqueeze (x, last) d = DFT (u, n, a) e = Constant <value_ints = [1, 2]> () "
    "y = ReduceSum <keepdims = 0> (d, e)",
    "transforms with that step": "f = Constant <value_int = 2> () u = Unsqueeze (x, last) d = STFT (u, n, , f) "
    "e = Constant <value_ints = [1, 2, 3]> () y = ReduceMean <keepdims = 0> (d, e)",
    "as many times longer": "f = Cast <to = 1> (s) o = Constant <value_floats = [1.0]> () c = Concat <axis = 0> (o, f) "
    'r = Resize <mode = "linear"> (x, , c) y = ReduceSum (r, one)',
    "as long": 'a = Add (s, two) b = Sub (a, one) c = Concat <axis = 0> (s, b) r = Resize <mode = "linear"> (x, , , c) y = ReduceSum (r, one)',
    "the number of numbers that are less": "r = Constant <value_ints = [0, 1, 2, 3]> () b = Less (r, few) z = NonZero (b) "
    "q = Shape <start = 1> (z) f = Cast <to = 1> (q) y = Add (x, f)",
}  # fmt: skip

_LENGTH = """m = Shape <start = 1, end = 2> (x) s = Shape <start = 0, end = 1> (x) one = Constant <value_ints = [1]> ()
    two = Constant <value_ints = [2]> () last = Constant <value_ints = [-1]> () f = Cast <to = 1> (m)
    f2 = Constant <value_floats = [2.0]> () h = Div (f, f2) v = Tile (x, t) t = Constant <value_ints = [1, 12]> () """
# `a` is 0 if there are 5 columns.
_COPIED = """t1 = Concat <axis = 0> (s, a, last) r1 = Reshape (x, t1) p = Transpose <perm = [1, 0, 2]> (r1)
    t2 = Concat <axis = 0> (one, a, s, last) r2 = Reshape (p, t2) y = Transpose <perm = [2, 0, 1, 3]> (r2)"""
# The rows behind as many elements as there are of `b`, which were as many as there are of `a`.
_MOVED = """t1 = Concat <axis = 0> (s, a, last) r1 = Reshape (v, t1) p = Transpose <perm = [1, 0, 2]> (r1)
    t2 = Concat <axis = 0> (b, s, last) r2 = Reshape (p, t2) y = Transpose <perm = [1, 0, 2]> (r2)"""

BY_LENGTH = {
    "a half rounded up and down": f"c = Ceil (h) d = Floor (h) a = Cast <to = 7> (c) b = Cast <to = 7> (d) {_MOVED}",
    "twice a half, and twice its integer": f"c = Mul (h, f2) a = Cast <to = 7> (c) d = Cast <to = 7> (h) b = Mul (d, two) {_MOVED}",
    "zero, which copies a size": f"five = Constant <value_ints = [5]> () a = Sub (m, five) {_COPIED}",
    "the length of nothing, which copies a size": "five = Constant <value_ints = [5]> () w = Slice (x, five, m, one) "
    f"a = Shape <start = 1> (w) {_COPIED}",
}  # fmt: skip

_RELU_IF = """y = If <then_branch = p () => (p1) { p1 = Relu (x) }, else_branch = q () => (q1) { q1 = Softmax <axis = 0> (x) }> (d)"""

BY_DATATYPE = {
    "a remainder with the sign of the dividend": "a = Constant <value_ints = [-6]> () b = Constant <value_ints = [4]> () "
    "c = Mod <fmod = 1> (a, b) e = Constant <value_ints = [2]> () w = Unsqueeze (x, e) t = Transpose <perm = [1, 0, 2]> (w) "
    "r = ReduceMax (t, c) d = Sub (t, r) p = Transpose <perm = [1, 0, 2]> (d) y = Squeeze (p, e)",
    "a number beyond its datatype": "a = Constant <value_int = 256> () b = Cast <to = 2> (a) c = Cast <to = 7> (b) d = Equal (c, a) "
    "y = If <then_branch = p () => (p1) { p1 = Relu (x) }, else_branch = q () => (q1) { q1 = Softmax <axis = 0> (x) }> (d)",
    "a difference below zero": "a = Constant <value = uint8 {3}> () b = Constant <value = uint8 {5}> () c = Sub (a, b) "
    "d = Cast <to = 9> (m) m = Greater (c, b) y = If <then_branch = p () => (p1) { p1 = Softmax <axis = 0> (x) }, "
    "else_branch = q () => (q1) { q1 = Relu (x) }> (d)",
    "a product beyond its datatype": "a = Constant <value = int32[1] {1073741824}> () b = Constant <value = int32[1] {4}> () "
    "c = Mul (a, b) o = Constant <value = int32[1] {1}> () e = Add (c, o) z = Constant <value = int32[1] {0}> () "
    "p = Slice (x, z, e, z) y = Add (x, p)",
    "a number that is cast to less bits": "a = Constant <value_ints = [4294967297]> () e = Cast <to = 6> (a) "
    "z = Constant <value = int32[1] {0}> () p = Slice (x, z, e, z) y = Add (x, p)",
    "a shape that is filled with bytes": "o = Constant <value_ints = [1]> () u = ConstantOfShape <value = uint8[1] {200}> (o) "
    f"v = Add (u, u) w = Cast <to = 7> (v) k = Constant <value_ints = [400]> () d = Equal (w, k) {_RELU_IF}",
    "a sum that is rounded": "a = Constant <value_float = 16777216.0> () b = Constant <value_float = 1.0> () c = Add (a, b) "
    f"e = Equal (a, c) d = Not (e) {_RELU_IF}",
    "a number that is rounded": "a = Constant <value_int = 16777217> () b = Cast <to = 1> (a) c = Cast <to = 7> (b) "
    f"d = Equal (a, c) {_RELU_IF}",
    "a sum of all that is rounded": "a = Constant <value_floats = [16777216.0, 1.0]> () b = Constant <value_float = 16777216.0> () "
    f"c = ReduceSum <keepdims = 0> (a) e = Equal (b, c) d = Not (e) {_RELU_IF}",
    "a range that is rounded": "a = Constant <value_float = 16777216.0> () b = Constant <value_float = 16777220.0> () "
    "o = Constant <value_float = 1.0> () r = Range (a, b, o) one = Constant <value_int = 1> () c = Gather (r, one) "
    f"e = Equal (a, c) d = Not (e) {_RELU_IF}",
    "a length that wraps around and is divided again": "m = Shape <start = 1> (x) i = Cast <to = 6> (m) "
    "k = Constant <value = int32[1] {65536}> () a = Mul (i, k) b = Mul (a, k) c = Div (b, k) e = Div (c, k) "
    f"d = Equal (e, i) {_RELU_IF}",
    "a ratio of lengths, divided as a fraction": "m = Shape <start = 1> (x) f = Cast <to = 1> (m) t = Constant <value_floats = [2.0]> () "
    "v = Constant <value_floats = [5.0]> () f5 = Mul (f, v) f2 = Mul (f, t) a = Div (f5, f) b = Div (f2, f) c = Div (a, b) "
    f"d = Equal (c, t) {_RELU_IF}",
    "a fraction in 32 bits and in 64": "m = Shape <start = 1> (x) f = Cast <to = 1> (m) g = Cast <to = 11> (m) "
    "t = Constant <value_floats = [3.0]> () u = Cast <to = 11> (t) a = Div (f, t) b = Cast <to = 11> (a) c = Div (g, u) "
    f"d = Equal (b, c) {_RELU_IF}",
    "a product of a fraction in 32 bits and in 64": "m = Shape <start = 1> (x) f = Cast <to = 1> (m) g = Cast <to = 11> (m) "
    "t = Constant <value_floats = [77.0]> () u = Cast <to = 11> (t) a = Div (f, t) b = Mul (a, t) i = Cast <to = 7> (b) "
    f"c = Div (g, u) e = Mul (c, u) j = Cast <to = 7> (e) d = Equal (i, j) {_RELU_IF}",
    "sums of a fraction in another order": "m = Shape <start = 1> (x) f = Cast <to = 1> (m) t = Constant <value_floats = [7.0]> () "
    "a = Div (f, t) v = Constant <value_floats = [5.0]> () b = Mul (a, v) a2 = Add (a, a) a3 = Add (a2, a) c = Add (a3, a2) "
    f"d = Equal (b, c) {_RELU_IF}",
    "the greater of one and NaN": "a = Constant <value_floats = [1.0]> () n = Constant <value = float[1] {nan}> () "
    f"c = Max (a, n) d = Equal (a, c) {_RELU_IF}",
    "a fraction of two lengths, and its integer": "m = Shape <start = 1> (x) t = Constant <value_ints = [1, 2]> () k = Tile (x, t) "
    "o = Constant <value_ints = [1]> () p = Pad (k, u, , o) u = Constant <value_ints = [0, 1]> () "
    "g = Shape <start = 1> (p) q = Div (g, m) qf = Cast <to = 1> (q) gf = Cast <to = 1> (g) mf = Cast <to = 1> (m) rf = Div (gf, mf) "
    f"d = Equal (qf, rf) {_RELU_IF}",
    "a start before the first element": "k = Constant <value_ints = [0]> () a = Constant <value_ints = [-100]> () "
    "b = Constant <value_ints = [-1000]> () t = Constant <value_ints = [-1]> () c = Slice (k, a, b, k, t) "
    "m = ReduceMax <noop_with_empty_axes = 1> (x, c) y = Sub (x, m)",
}  # fmt: skip

# What collects the state of each iteration has other sizes than the last state.
_LOOP = """one = Constant <value_ints = [1]> () zero = Constant <value_ints = [0]> () n = Constant <value_int = 1> () on = Constant <value = bool {1}> ()
    w = Slice (x, zero, one, one) h = Concat <axis = 1> (w, w) last = Constant <value_ints = [-1]> ()
    end, all = Loop <body = g (int64 i, bool d, float[N, K] h1) => (bool d2, float[N, K2] o, float[N, K] c1)
    { d2 = Identity (d) c1 = Identity (h1) o = Slice (h1, zero, one, one) }> (n, on, h)
    c = Squeeze (all, zero) k = Shape <start = 1, end = 2> (end) t = Concat <axis = 0> (last, k) r = Reshape (c, t)
    s = Shape <start = 0, end = 1> (x) j = Concat <axis = 0> (r, w) y = Slice (j, zero, s, zero)"""


MIXING = {
    **{f"by the number of rows: {name}": _COUNT + body for name, body in BY_NUMBER_OF_ROWS.items()},
    **{f"different functions of a length: {name}": _LENGTH + body for name, body in BY_LENGTH.items()},
    **{f"by the datatype: {name}": body for name, body in BY_DATATYPE.items()},
    "what a loop collects has sizes of its own": _LOOP,
}


@pytest.mark.parametrize("case", MIXING)
def test_rows_that_mix_by_computed_numbers_are_not_proved(case: str, tmp_path: Path) -> None:
    _check(tmp_path, MIXING[case])


def test_a_function_with_the_name_of_an_operator_is_not_followed(tmp_path: Path) -> None:
    """ONNX Runtime runs the operator."""
    function = '<domain: "", opset_import: ["" : 21]> ReduceMax (a) => (b) { b = Relu (a) }'
    _check(tmp_path, "m = ReduceMax (x) y = Sub (x, m)", function)


def test_the_function_with_the_overload_of_the_call_is_followed(tmp_path: Path) -> None:
    mixing, apart = (
        f'<domain: "local", opset_import: ["" : 21]> F (a) => (b) {{ {body} }}'
        for body in ("m = ReduceMax (a) b = Sub (a, m)", "b = Relu (a)")
    )
    made = model(_graph("y = local.F (x)", mixing))
    made.functions.append(model(_graph("y = local.F (x)", apart)).functions[0])
    made.ir_version = 10
    made.functions[0].overload = made.graph.node[0].overload = "one"
    onnx.save(made, tmp_path / "m.onnx")
    assert analyse_batching(tmp_path / "m.onnx", ["x"]).finding is RowMixing.MIXES
    assert not rows_stay_apart(tmp_path / "m.onnx", 5)


def _graph(body: str, function: str = "") -> str:
    return f"g (float[N, S] x) => (float[N] y) {{ {body} }} {function}"


def _check(folder: Path, body: str, function: str = "") -> None:
    assert analysed(folder, _graph(body, function)).finding is not RowMixing.SEPARATE
    assert not rows_stay_apart(folder / "m.onnx", 5)
