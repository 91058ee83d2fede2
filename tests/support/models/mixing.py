"""ONNX models with independent rows, and models that mix rows, some only for few values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from support.models.small import written

Build = Callable[[Path], Path]

_RANDOM = np.random.default_rng(5)
_X_TO_Y = "(float[batch, 3] x) => (float[batch, 3] y)"


def log_mel(path: Path, axes: tuple[int, ...] = (0, 1)) -> Path:
    """y = max(log x, max(log x) - 8), as in Whisper's features. The maximum is over the batch if `axes` has 0."""
    text = f"""{_X_TO_Y} {{
        positive = Max (x, least) log = Log (positive)
        greatest = ReduceMax <axes = {list(axes)}, keepdims = 1> (log)
        floor = Sub (greatest, eight) y = Max (log, floor)
    }}"""
    return written(path, text, names={2: "/mel/max"}, least=np.float32(1e-10), eight=np.float32(8))


def scaled(path: Path, axes: tuple[int, ...] = (0, 1)) -> Path:
    """y = x / max(100, max(x))."""
    text = f"""{_X_TO_Y} {{
        greatest = ReduceMax <axes = {list(axes)}, keepdims = 1> (x)
        divisor = Max (greatest, hundred) y = Div (x, divisor)
    }}"""
    return written(path, text, hundred=np.float32(100))


def clipped_integers(path: Path) -> Path:
    """y = min(x, max(1000, least x of the batch)): rows mix only if integers exceed 1000."""
    text = """(int64[batch, 3] x) => (int64[batch, 3] y) {
        least = ReduceMin <keepdims = 1> (x) limit = Max (least, most) y = Min (x, limit)
    }"""
    return written(path, text, most=np.int64(1000))


def similarity(path: Path) -> Path:
    """y [batch, batch]: the products of all rows with all rows."""
    text = """(float[batch, 3] x) => (float[batch, others] y) {
        columns = Transpose <perm = [1, 0]> (x) y = MatMul (x, columns)
    }"""
    return written(path, text)


def sorted_rows(path: Path) -> Path:
    """y: each column of x sorted over the batch."""
    return written(
        path, f"{_X_TO_Y} {{ rows = Shape <start = 0, end = 1> (x) y, places = TopK <axis = 0> (x, rows) }}"
    )


def recurrent(path: Path, kind: str) -> Path:
    """x [batch, time, 3] → y [batch, 4]: the last state of an LSTM or a GRU, whose batch axis is its second."""
    gates = {"LSTM": 4, "GRU": 3}[kind]
    text = f"""(float[batch, time, 3] x) => (float[batch, 4] y) {{
        steps = Transpose <perm = [1, 0, 2]> (x)
        states, last = {kind} <hidden_size = 4> (steps, w, r)
        y = Squeeze (last, axis)
    }}"""
    w, r = (_RANDOM.standard_normal((1, 4 * gates, width)).astype(np.float32) for width in (3, 4))
    return written(path, text, w=w, r=r, axis=np.array([0]))


def quantised(path: Path, dynamic: bool) -> Path:
    """x [batch, 8] → y [batch, 4]: a layer in 8 bits, with a constant scale or the scale of the batch."""
    weights = _RANDOM.integers(-100, 100, (8, 4)).astype(np.int8)
    constants: dict[str, Any] = {"w": weights, "w_zero": np.int8(0), "w_scale": np.float32(0.02)}
    if dynamic:
        quantise = "q, scale, zero = DynamicQuantizeLinear (x)"
    else:
        quantise = "q = QuantizeLinear (x, scale, zero)"
        constants |= {"scale": np.float32(0.03), "zero": np.uint8(128)}
    text = f"""(float[batch, 8] x) => (float[batch, 4] y) {{
        {quantise} sums = MatMulInteger (q, w, zero, w_zero) numbers = Cast <to = 1> (sums)
        times = Mul (numbers, scale) y = Mul (times, w_scale)
    }}"""
    return written(path, text, names={0: "/layer/quantise"} if dynamic else None, **constants)


def batch_normalised(path: Path) -> Path:
    """x [batch, 2, n] → y: normalised by constants."""
    text = """(float[batch, 2, n] x) => (float[batch, 2, n] y) {
        y = BatchNormalization (x, one, zero, zero, one)
    }"""
    return written(path, text, one=np.ones(2, np.float32), zero=np.zeros(2, np.float32))


def hashed(path: Path) -> Path:
    """x INT32 [batch] → y UINT32 [batch], by an operator of ONNX Runtime that is not in the ONNX standard."""
    text = "(int32[batch] x) => (uint32[batch] y) { y = com.microsoft.MurmurHash3 (x) }"
    return written(path, text, names={0: "/hash"}, check=False)


def hashed_elevens(path: Path) -> Path:
    """x [batch, n] → y UINT32 [batch, parts, 11], as `hashed`; n must be a multiple of 11, unlike random inputs."""
    text = """(float[batch, n] x) => (uint32[batch, parts, 11] y) {
        sizes = Constant <value_ints = [0, -1, 11]> () grouped = Reshape (x, sizes)
        y = com.microsoft.MurmurHash3 (grouped)
    }"""
    return written(path, text, names={2: "/hash"}, check=False)
