"""Operators that mix rows by their nature are refused, not run to see; what may keep rows apart is not refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from server.onnx.graph.build import analysed
from support.models import hidden_mixing

from tensorferry.server.onnx.graph import RowMixing, analyse_batching

NAMED = {
    "loop": "Loop last passes values of one row on to the next rows",
    "scan": "Scan last passes values of one row on to the next rows",
    "sequence": "SequenceAt first takes a part of the batch axis",
    "random": "RandomUniform number is random, also with a seed",
    "peak": "ReduceMax peak reduces over the batch axis",
}


@pytest.mark.parametrize("kind", hidden_mixing.KINDS)
def test_the_node_that_mixes_rows_is_named(kind: str, tmp_path: Path) -> None:
    found = analyse_batching(hidden_mixing.save(tmp_path / "m.onnx", kind), ["x"])
    assert found.finding is RowMixing.MIXES
    assert found.reasons[0].startswith(NAMED[kind])


_ROWS = """s = Shape <start = 0, end = 1> (x) n = Squeeze (s) zero = Constant <value_int = 0> ()
    one = Constant <value_int = 1> () on = Cast <to = 9> (one) first = Constant <value_ints = [0]> ()
    none = Constant <value_floats = [0.0, 0.0, 0.0, 0.0]> () half = Constant <value_float = 0.5> () """


def _over(count: str, state: str, body: str, outputs: str = "l, y", given: str = "none") -> str:
    """Return a Loop that runs `body` with the iteration i and a part h of the state, which becomes h2."""
    more = ", float[4] o" if "," in outputs else ""
    return (
        f"{outputs} = Loop <body = b (int64 i, bool d, {state} h) => (bool d2, {state} h2{more}) "
        f"{{ d2 = Identity (d) {body} }}> ({count}, on, {given})"
    )


_ROW, _ALL = "float[4]", "float[M, 4]"

MIXED = {
    "a while loop that adds up rows": "most = Constant <value_int = 9223372036854775807> () go = Less (zero, n) "
    "last, l, y = Loop <body = b (int64 i, bool d, int64 k, float[4] h) => (bool d2, int64 k2, float[4] h2, float[4] o) "
    "{ r = Gather (x, k) h2 = Add (h, r) o = Relu (h2) k2 = Add (k, one) d2 = Less (k2, n) }> (most, go, zero, none)",
    "a loop over parts": "q = SplitToSequence <keepdims = 0> (x) k = SequenceLength (q) "
    + _over("k", _ROW, "r = SequenceAt (q, i) h2 = Max (h, r) o = Sub (r, h)"),
    "a loop that takes slices": _over(
        "n", _ROW, "a = Unsqueeze (i, first) e = Add (a, one) r = Slice (x, a, e, first) t = Squeeze (r, first) "
        "h2 = Add (h, t) o = Relu (h2)"
    ),
    "as many changes of all rows as there are rows": _over("n", _ALL, "h2 = Add (h, h)", "y", "x"),
    "a loop that ends at some row": "y = Loop <body = b (int64 i, bool d) => (bool d2, float[4] o) "
    "{ o = Gather (x, i) t = ReduceSum <keepdims = 0> (o) d2 = Cast <to = 9> (t) }> (n, on)",
    "a loop that compares each row with all rows": "y = Loop <body = b (int64 i, bool d) => (bool d2, float[4] o) "
    "{ d2 = Identity (d) r = Gather (x, i) e = Sub (x, r) o = ReduceMin <axes = [0], keepdims = 0> (e) }> (n, on)",
    "the mean of the batch, in an unknown number of iterations": "k = com.acme.Foo (x) "
    + _over("k", _ALL, "m = ReduceMean <axes = [0]> (h) h2 = Sub (h, m)", "y", "x"),
    "the mean of the batch, in a branch for several rows": "c = Greater (n, one) y = If <then_branch = a () => (p) "
    "{ m = ReduceMean <axes = [0]> (x) p = Sub (x, m) }, else_branch = b () => (q) { q = Relu (x) }> (c)",
    "the mean of the batch, for each part": "q = SplitToSequence <axis = 0> (x) w = SequenceMap "
    "<body = b (e, a) => (o) { m = ReduceMean <axes = [0]> (a) o = Sub (e, m) }> (q, x) y = ConcatFromSequence <axis = 0> (w)",
    "random numbers behind a custom operator": "k = com.acme.Foo (x) y = RandomNormalLike (k)",
    "random weights": "w = Dropout (none, half, on) y = Add (x, w)",
    "the numbers of rows": "y = Range (zero, n, one)",
}  # fmt: skip
NOT_MIXED = {
    "a loop that counts": _over("n", "int64", "h2 = Add (h, one) o = Gather (x, h)", given="zero"),
    "a loop that collects rows in a sequence": "q = SequenceEmpty () "
    + _over("n", "seq(float[4])", "r = Gather (x, i) h2 = SequenceInsert (h, r)", "w", "q")
    + " y = ConcatFromSequence <axis = 0, new_axis = 1> (w)",
    "a loop that collects rows in a tensor": "e = Constant <value = float[0, 4] {}> () "
    + _over("n", _ALL, "a = Unsqueeze (i, first) r = Gather (x, a) h2 = Concat <axis = 0> (h, r)", "y", "e"),
    "a loop that writes rows": "t = Shape (x) e = ConstantOfShape (t) "
    + _over(
        "n", _ALL, "a = Unsqueeze (i, first) r = Gather (x, a) a2 = Unsqueeze (a, first) h2 = ScatterND (h, a2, r)", "y", "e"
    ),
    "a loop that writes where a row says": "t = Shape (x) e = ConstantOfShape (t) "
    + _over(
        "n", _ALL, "r = Gather (x, i) a = ArgMax <axis = 0, keepdims = 1> (r) i1 = Unsqueeze (i, first) "
        "ia = Concat <axis = 0> (i1, a) at = Unsqueeze (ia, first) v = ReduceMax <keepdims = 0> (r) v1 = Unsqueeze (v, first) "
        "h2 = ScatterND (h, at, v1)", "y", "e"
    ),
    "a loop within each row": "three = Constant <value_int = 3> () y = Loop <body = b (int64 i, bool d) => (bool d2, float[4] o) "
    "{ d2 = Identity (d) r = Gather (x, i) o = Loop <body = b2 (int64 j, bool e, float[4] g) => (bool e2, float[4] g2) "
    "{ e2 = Identity (e) g2 = Add (g, r) }> (three, on, none) }> (n, on)",
    "parts that are joined again": "q = SplitToSequence <axis = 0> (x) w = SequenceMap <body = b (e) => (o) { o = Relu (e) }> (q) "
    "y = ConcatFromSequence <axis = 0> (w)",
    "parts of a row": "q = SplitToSequence <axis = 1> (x, one) f = SequenceAt (q, zero) y = Add (x, f)",
    "one of two copies of all rows": "w = Concat <axis = 0> (x, x) q = SplitToSequence <axis = 0> (w, n) y = SequenceAt (q, zero)",
    "the shape of random numbers": "r = RandomNormalLike (x) t = Shape (r) w = ConstantOfShape (t) y = Add (x, w)",
    "random numbers that no output needs": "r = RandomNormalLike (x) y = Relu (x)",
    "dropout outside of training": "y = Dropout (x)",
    "dropout of nothing": "none_at_all = Constant <value_float = 0.0> () y = Dropout (x, none_at_all, on)",
}  # fmt: skip


def _graph(body: str) -> str:
    return f"g (float[N, 4] x) => (float[M, 4] y) {{ {_ROWS} {body} }}"


@pytest.mark.parametrize("case", MIXED)
def test_what_mixes_rows_in_every_run_is_refused(case: str, tmp_path: Path) -> None:
    found = analysed(tmp_path, _graph(MIXED[case]))
    assert found.finding is RowMixing.MIXES, found.reasons


@pytest.mark.parametrize("case", NOT_MIXED)
def test_what_may_keep_rows_apart_is_not_refused(case: str, tmp_path: Path) -> None:
    found = analysed(tmp_path, _graph(NOT_MIXED[case]))
    assert found.finding is not RowMixing.MIXES, found.reasons
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"))
    x = np.random.default_rng(1).standard_normal((3, 4)).astype(np.float32)
    alone = [session.run(["y"], {"x": x[at : at + 1]})[0] for at in range(3)]
    np.testing.assert_array_equal(session.run(["y"], {"x": x})[0], np.concatenate(alone))
