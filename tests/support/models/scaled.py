"""Models with one input that has a batch axis, and others without."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from support.models.small import node, save, value


def scaled(path: Path) -> Path:
    """x FP32 [n, 3], scale FP32 [] → y FP32 [n, 3], x times scale."""
    return save(
        path,
        [node("Mul", "x scale", "y")],
        [value("x", dims=["n", 3]), value("scale", dims=[])],
        [value("y", dims=["n", 3])],
    )


def with_defaults(path: Path) -> Path:
    """x FP32 [n, 3], scale FP32 [] (2 by default), bias FP32 [3] (0 by default) → y FP32 [n, 3], x times scale plus bias."""
    return save(
        path,
        [node("Mul", "x scale", "scaled"), node("Add", "scaled bias", "y")],
        [value("x", dims=["n", 3]), value("scale", dims=[]), value("bias", dims=[3])],
        [value("y", dims=["n", 3])],
        {"scale": np.float32(2), "bias": np.zeros(3, np.float32)},
    )


def sometimes_mixing(path: Path) -> Path:
    """x FP32 [n, 3], among BOOL [1] → y FP32 [n, 3]: x minus the mean of all rows if `among`, else x."""
    return save(
        path,
        [
            node("ReduceMean", "x", "mean", axes=[0]),
            node("Where", "among mean zero", "less"),
            node("Sub", "x less", "y"),
        ],
        [value("x", dims=["n", 3]), value("among", "BOOL", [1])],
        [value("y", dims=["n", 3])],
        {"zero": np.float32(0)},
    )
