"""Recurrent models, for which ONNX Runtime aborts the process if some tensors have an axis of length zero."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from support.models.small import node, save, value

_HIDDEN = 4
_WIDTH = 3
WORDS = 10


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
