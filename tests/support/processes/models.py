"""ONNX models for tests: slow ones, ones that raise for a row, ones that mix their rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import TensorProto, helper
from support.models.small import Dims, node, save, value

TABLE_SIZE = 10
_SIDE = 192


def probe(path: Path) -> Path:
    """x FP32 [batch, 4], index INT64 [batch], work INT64 [batch] to y FP32 [batch, 4].

    y = 2 x + table[index] with table[i] = i. An index beyond the table raises, and fails the whole
    run. The largest `work` of a batch is the number of matrix products that the run computes, some
    tenths of a millisecond each.
    """
    square = [_SIDE, _SIDE]
    body = helper.make_graph(
        [node("Identity", "go_on", "go_on_out"), node("MatMul", "state turn", "state_out")],
        "body",
        [value("i", "INT64", []), value("go_on", "BOOL", []), value("state", dims=square)],
        [value("go_on_out", "BOOL", []), value("state_out", dims=square)],
    )
    return save(
        path,
        [
            # Rows do not affect each other's outputs, though the largest of a batch is computed.
            # The graph alone would mix them; the analysis does not know an operator of ONNX
            # Runtime's own.
            node("Cast", "work", "amounts", to=TensorProto.FLOAT),
            helper.make_node(
                "Unique", ["amounts"], ["different", "places", "counts"], domain="com.microsoft"
            ),
            node("ReduceMax", "different", "most", keepdims=0),
            node("Cast", "most", "turns", to=TensorProto.INT64),
            node("Loop", "turns yes start", "end", body=body),
            node("ReduceSum", "end", "zero", keepdims=0),
            node("Gather", "table index", "entry"),
            node("Mul", "x two", "doubled"),
            node("Add", "doubled entry", "sum"),
            node("Add", "sum zero", "y"),
        ],
        [
            value("x", dims=["batch", 4]),
            value("index", "INT64", ["batch"]),
            value("work", "INT64", ["batch"]),
        ],
        [value("y", dims=["batch", 4])],
        {
            "turn": np.eye(_SIDE, dtype=np.float32),
            "start": np.zeros(square, np.float32),
            "yes": True,
            "two": np.float32(2),
            "table": np.arange(TABLE_SIZE, dtype=np.float32).reshape(TABLE_SIZE, 1),
        },
    )


def mixing(path: Path) -> Path:
    """x FP32 [batch, 3] to share FP32 [batch, 3]: a softmax over the batch, so rows affect each other."""
    return save(path, [node("Softmax", "x", "share", axis=0)], [value("x")], [value("share")])


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
