"""ONNX models that mix rows, and models whose graphs cannot be analysed fully."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from support.models.small import written

_X_TO_Y = "(float[batch, 3] x) => (float[batch, 3] y)"


def log_mel(path: Path) -> Path:
    """y = max(log x, max(log x) - 8), as in Whisper's features. The maximum is over the batch."""
    text = f"""{_X_TO_Y} {{
        positive = Max (x, least) log = Log (positive)
        greatest = ReduceMax <axes = [0, 1], keepdims = 1> (log)
        floor = Sub (greatest, eight) y = Max (log, floor)
    }}"""
    return written(path, text, least=np.float32(1e-10), eight=np.float32(8))


def scaled(path: Path) -> Path:
    """y = x / max(100, max(x))."""
    text = f"""{_X_TO_Y} {{
        greatest = ReduceMax <axes = [0, 1], keepdims = 1> (x)
        divisor = Max (greatest, hundred) y = Div (x, divisor)
    }}"""
    return written(path, text, hundred=np.float32(100))


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
