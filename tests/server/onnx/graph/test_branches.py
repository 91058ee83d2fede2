"""An If that depends on the length of an axis takes one branch for all rows: each is followed on its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from server.onnx.graph.build import analysed, rows_stay_apart
from server.onnx.graph.test_free_rows import weights

from tensorferry.server.onnx.graph import RowMixing

CONSTANTS = {
    "zero": np.array([0]),
    "one": np.array([1]),
    "last": np.array([-1]),
    "times": np.array(3),
    "yes": np.array(True),
    "w": weights(1, 16, 3),
    "r": weights(1, 16, 4),
}


def branch(condition: str, then: str, other: str, made: str) -> str:
    """`then` and `other` name the result "p"."""
    return (
        f"{made} = If ({condition}) <then_branch = a{made} () => (p) {{ {then} }}, "
        f"else_branch = o{made} () => (p) {{ {other} }}>"
    )


def graph(body: str, inputs: str = "float[N, 3, L] x") -> str:
    return f"g ({inputs}) => (float[N] y) {{ s = Shape <start = 2> (x) short = Equal (s, one) {body} }}"


SQUEEZED = branch("short", "p = Squeeze (x, last)", "p = Identity (x)", "m")
LSTM = "u = Unsqueeze ({}, zero) a, h = LSTM <hidden_size = 4> (u, w, r) y = Squeeze (h, zero)"

SEPARATE = {
    "both branches keep the rows apart": f"{SQUEEZED} y = Flatten (m)",
    "what follows fails behind one of them": f"{SQUEEZED} {LSTM.format('m')}",
    "two lengths": f"{SQUEEZED} t = Flatten (m) v = Shape <start = 1> (t) few = Equal (v, last) "
    + branch("few", "p = Squeeze (t, last)", "p = Identity (t)", "n") + " y = Flatten (n)",
}  # fmt: skip


@pytest.mark.parametrize("case", SEPARATE)
def test_rows_are_separate(tmp_path: Path, case: str) -> None:
    found = analysed(tmp_path, graph(SEPARATE[case]), constants=CONSTANTS)
    assert found.finding is RowMixing.SEPARATE, found.reasons
    assert rows_stay_apart(tmp_path / "m.onnx", 3, 1)


def test_a_branch_that_fails_leaves_the_other(tmp_path: Path) -> None:
    """A shared input chooses. For longer rows one branch fails."""
    lstm = LSTM.format("m").replace("y =", "p =")
    text = graph(f"{SQUEEZED} {branch('flag', lstm, 'p = Flatten (x)', 'y')}", "float[N, 3, L] x, bool flag")
    assert analysed(tmp_path, text, constants=CONSTANTS).finding is RowMixing.SEPARATE
    mixing = text.replace("p = Flatten (x)", "p = ReduceMax <keepdims = 1> (x)")
    assert analysed(tmp_path, mixing, constants=CONSTANTS).finding is not RowMixing.SEPARATE


def test_onnx_runtime_refuses_the_runs_that_are_said_to_fail(tmp_path: Path) -> None:
    analysed(tmp_path, graph(SEPARATE["what follows fails behind one of them"]), constants=CONSTANTS)
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    session.run(None, {"x": weights(5, 3, 1)})
    for rows in (1, 5):
        with pytest.raises(Exception, match="3 dimensions"):
            session.run(None, {"x": weights(rows, 3, 2)})


_LOOP = (
    "y = Loop <body = g (int64 i, bool d, float[N, 3] h) => (bool d2, float[N, 3] o) "
    "{{ d2 = Identity (d) {} }}> (times, yes, start)"
)
# The length in the loop is another one in each iteration, and the LSTM may run in none.
_GROWING = (
    "v = Shape <start = 1> (h) at = Equal (v, one) "
    + branch("at", "p = Squeeze (h, last)", "p = Identity (h)", "m")
    + " f = Flatten (m) o = Concat <axis = 1> (f, f)"
)

NOT_SEPARATE = {
    "one branch mixes rows": branch(
        "short", "p = Squeeze (x, last)", "t = ReduceMax <keepdims = 1> (x) p = Sub (x, t)", "y"
    ),
    "by the number of rows": "t = Shape <end = 1> (x) alone = Equal (t, one) "
    + branch("alone", "p = Squeeze (x, last)", "p = Identity (x)", "m")
    + " y = Flatten (m)",
    "by values": "t = ReduceMax <keepdims = 0> (x) g = Greater (t, t) "
    + branch("g", "p = Squeeze (x, last)", "p = Identity (x)", "m")
    + " y = Flatten (m)",
    "in a repeated graph": f"start = Flatten (x) {_LOOP.format(_GROWING)}",
    "fails in a repeated graph": "start = Flatten (x) "
    + _LOOP.format("k = Squeeze (h, zero) j, o = LSTM <hidden_size = 4> (k, w, r)"),
    "three lengths": " ".join(
        f"f{at} = Equal (s, l{at}) " + branch(f"f{at}", "p = Squeeze (x, last)", "p = Identity (x)", f"m{at}")
        + f" y{at} = Flatten (m{at})"
        for at in range(3)
    )
    + " y = Concat <axis = 1> (y0, y1, y2)",
}  # fmt: skip


@pytest.mark.parametrize("case", NOT_SEPARATE)
def test_nothing_is_proved(tmp_path: Path, case: str) -> None:
    lengths = {f"l{at}": np.array([at]) for at in range(3)}
    found = analysed(tmp_path, graph(NOT_SEPARATE[case]), constants={**CONSTANTS, **lengths})
    assert found.finding is not RowMixing.SEPARATE
