"""Models with one input that has a batch axis, and others without."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from support.models.small import written


def scaled(path: Path) -> Path:
    """x FP32 [n, 3], scale FP32 [] → y FP32 [n, 3], x times scale."""
    return written(path, "(float[n, 3] x, float scale) => (float[n, 3] y) { y = Mul (x, scale) }")


def with_defaults(path: Path) -> Path:
    """x FP32 [n, 3], scale FP32 [] (2 by default), bias FP32 [3] (0 by default) → y FP32 [n, 3], x times scale plus bias."""
    text = """(float[n, 3] x, float scale, float[3] bias) => (float[n, 3] y) {
        scaled = Mul (x, scale) y = Add (scaled, bias)
    }"""
    return written(path, text, scale=np.float32(2), bias=np.zeros(3, np.float32))


def sometimes_mixing(path: Path) -> Path:
    """x FP32 [n, 3], among BOOL [1] → y FP32 [n, 3]: x minus the mean of all rows if `among`, else x."""
    text = """(float[n, 3] x, bool[1] among) => (float[n, 3] y) {
        mean = ReduceMean <axes = [0]> (x) less = Where (among, mean, zero) y = Sub (x, less)
    }"""
    return written(path, text, zero=np.float32(0))
