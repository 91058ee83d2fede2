"""ONNX models for tests: slow ones, ones that raise for a row, ones that mix their rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from support.models.small import Dims, node, save, value, written

TABLE_SIZE = 10
_SIDE = 192


def probe(path: Path) -> Path:
    """x FP32 [batch, 4], index INT64 [batch], work INT64 [batch] to y FP32 [batch, 4].

    y = 2 x + table[index] with table[i] = i. An index beyond the table raises, and fails the whole
    run. The largest `work` of a batch is the number of matrix products that the run computes, some
    tenths of a millisecond each.
    """
    # Rows do not affect each other's outputs, though the largest `work` of a batch is computed. The graph
    # alone would mix them; the analysis does not know Unique, an operator of ONNX Runtime's own.
    square = f"float[{_SIDE}, {_SIDE}]"
    text = f"""(float[batch, 4] x, int64[batch] index, int64[batch] work) => (float[batch, 4] y) {{
        amounts = Cast <to = 1> (work) different, places, counts = com.microsoft.Unique (amounts)
        most = ReduceMax <keepdims = 0> (different) turns = Cast <to = 7> (most)
        end = Loop <body = body (int64 i, bool go_on, {square} state) => (bool go_on_out, {square} state_out) {{
            go_on_out = Identity (go_on) state_out = MatMul (state, turn)
        }}> (turns, yes, start)
        zero = ReduceSum <keepdims = 0> (end) entry = Gather (table, index) doubled = Mul (x, two)
        sum = Add (doubled, entry) y = Add (sum, zero)
    }}"""
    return written(
        path, text, turn=np.eye(_SIDE, dtype=np.float32), start=np.zeros((_SIDE, _SIDE), np.float32), yes=True,
        two=np.float32(2), table=np.arange(TABLE_SIZE, dtype=np.float32).reshape(TABLE_SIZE, 1),
    )  # fmt: skip


def mixing(path: Path) -> Path:
    """x FP32 [batch, 3] to share FP32 [batch, 3]: a softmax over the batch, so rows affect each other."""
    return written(path, "(float[batch, 3] x) => (float[batch, 3] share) { share = Softmax <axis = 0> (x) }")


def echo(path: Path, datatype: str = "FP32", dims: Dims = ("batch", "n")) -> Path:
    """x [batch, n], or of another shape, to y = x, of any datatype."""
    x, y = value("x", datatype, dims), value("y", datatype, dims)
    return save(path, [node("Identity", "x", "y")], [x], [y])


def echoes(folder: Path, *datatypes: str, prefix: str = "echo", dims: Dims = ("batch", "n")) -> list[str]:
    """Return one such model for each datatype, named `echo-FP32` and so on, as arguments of
    `tensorferry serve`.
    """
    names = {f"{prefix}-{datatype}": datatype for datatype in datatypes}
    return [f"{name}={echo(folder / f'{name}.onnx', datatype, dims)}" for name, datatype in names.items()]
