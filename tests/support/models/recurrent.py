"""Recurrent models, for which ONNX Runtime aborts the process if a sequence has no step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from support.models.small import written

_HIDDEN = 4
_WIDTH = 3
WORDS = 10
# The number for which `aborting` ends the process.
ABORTS = 8.0


def _random(*shape: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def _weights(gates: int) -> dict[str, Any]:
    return {"w": _random(1, gates * _HIDDEN, _WIDTH), "r": _random(1, gates * _HIDDEN, _HIDDEN)}


def gru(path: Path) -> Path:
    """ids INT64 [n, length] → y FP32 [n, 4], the last state of a GRU over the embeddings of the ids."""
    text = """(int64[n, length] ids) => (float[n, 4] y) {
        embedded = Gather (embedding, ids) steps = Transpose <perm = [1, 0, 2]> (embedded)
        states, last = GRU <hidden_size = 4> (steps, w, r)
        y = Squeeze (last, axis)
    }"""
    return written(path, text, embedding=_random(WORDS, _WIDTH), **_weights(3), axis=np.array([0]))


def lstm(path: Path) -> Path:
    """x FP32 [n, length, 3] → states FP32 [n, length, 4] and y FP32 [n, 4], all states of an LSTM and the last one."""
    text = """(float[n, length, 3] x) => (float[n, length, 4] states, float[n, 4] y) {
        steps = Transpose <perm = [1, 0, 2]> (x)
        all, last = LSTM <hidden_size = 4> (steps, w, r)
        y = Squeeze (last, zero) by_step = Squeeze (all, one) states = Transpose <perm = [1, 0, 2]> (by_step)
    }"""
    return written(path, text, **_weights(4), zero=np.array([0]), one=np.array([1]))


def aborting(path: Path) -> Path:
    """x FP32 [batch, 4] → y = 3 x + 1. ONNX Runtime aborts the process if the last number of any row is `ABORTS`.

    The number of steps of a GRU is 1, and 0 if there is such a row.
    """
    text = """(float[batch, 4] x) => (float[batch, 4] y) {
        marks = Gather <axis = 1> (x, last_column) found = Equal (marks, aborts) counts = Cast <to = 7> (found)
        most = ReduceMax <axes = [0], keepdims = 1> (counts) step_count = Sub (one_step, most)
        steps = Slice (sequence, no_step, step_count)
        states, last = GRU <hidden_size = 4> (steps, w, r)
        total = ReduceSum <keepdims = 0> (last) nothing = Mul (total, zero)
        scaled = Mul (x, factor) sum = Add (scaled, offset) y = Add (sum, nothing)
    }"""
    numbers: dict[str, Any] = {"aborts": np.float32(ABORTS), "zero": np.float32(0), "factor": np.float32(3)}
    return written(
        path, text, last_column=np.array(3), one_step=np.array([1]), no_step=np.array([0]),
        sequence=_random(1, 1, _WIDTH), offset=np.float32(1), **numbers, **_weights(3),
    )  # fmt: skip
