"""Recurrent models, for which ONNX Runtime aborts the process if a sequence has no step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from onnx import TensorProto
from support.models.small import node, save, value

_HIDDEN = 4
_WIDTH = 3
WORDS = 10
# The number for which `aborting` ends the process.
ABORTS = 8.0


def _random(*shape: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def gru(path: Path) -> Path:
    """ids INT64 [n, length] → y FP32 [n, 4], the last state of a GRU over the embeddings of the ids."""
    return save(
        path,
        [
            node("Gather", "embedding ids", "embedded"),
            node("Transpose", "embedded", "steps", perm=[1, 0, 2]),
            node("GRU", "steps weights recurrence", "states last", hidden_size=_HIDDEN),
            node("Squeeze", "last axis", "y"),
        ],
        [value("ids", "INT64", ["n", "length"])],
        [value("y", dims=["n", _HIDDEN])],
        {
            "embedding": _random(WORDS, _WIDTH),
            "weights": _random(1, 3 * _HIDDEN, _WIDTH),
            "recurrence": _random(1, 3 * _HIDDEN, _HIDDEN),
            "axis": np.array([0]),
        },
    )


def lstm(path: Path) -> Path:
    """x FP32 [n, length, 3] → states FP32 [n, length, 4] and y FP32 [n, 4], all states of an LSTM and the last one."""
    return save(
        path,
        [
            node("Transpose", "x", "steps", perm=[1, 0, 2]),
            node("LSTM", "steps weights recurrence", "all last", hidden_size=_HIDDEN),
            node("Squeeze", "last first_axis", "y"),
            node("Squeeze", "all second_axis", "by_step"),
            node("Transpose", "by_step", "states", perm=[1, 0, 2]),
        ],
        [value("x", dims=["n", "length", _WIDTH])],
        [value("states", dims=["n", "length", _HIDDEN]), value("y", dims=["n", _HIDDEN])],
        {
            "weights": _random(1, 4 * _HIDDEN, _WIDTH),
            "recurrence": _random(1, 4 * _HIDDEN, _HIDDEN),
            "first_axis": np.array([0]),
            "second_axis": np.array([1]),
        },
    )


def aborting(path: Path) -> Path:
    """x FP32 [batch, 4] → y = 3 x + 1. ONNX Runtime aborts the process if the last number of any row is `ABORTS`.

    The number of steps of a GRU is 1, and 0 if there is such a row.
    """
    return save(
        path,
        [
            node("Gather", "x last_column", "marks", axis=1),
            node("Equal", "marks aborts", "found"),
            node("Cast", "found", "counts", to=TensorProto.INT64),
            node("ReduceMax", "counts", "most", axes=[0], keepdims=1),
            node("Sub", "one_step most", "step_count"),
            node("Slice", "sequence no_step step_count", "steps"),
            node("GRU", "steps weights recurrence", "states last", hidden_size=_HIDDEN),
            node("ReduceSum", "last", "total", keepdims=0),
            node("Mul", "total zero", "nothing"),
            node("Mul", "x factor", "scaled"),
            node("Add", "scaled offset", "sum"),
            node("Add", "sum nothing", "y"),
        ],
        [value("x", dims=["batch", 4])],
        [value("y", dims=["batch", 4])],
        {
            "last_column": np.array(3), "aborts": np.float32(ABORTS), "one_step": np.array([1]),
            "no_step": np.array([0]), "sequence": _random(1, 1, _WIDTH),
            "weights": _random(1, 3 * _HIDDEN, _WIDTH), "recurrence": _random(1, 3 * _HIDDEN, _HIDDEN),
            "zero": np.float32(0), "factor": np.float32(3), "offset": np.float32(1),
        },
    )  # fmt: skip
