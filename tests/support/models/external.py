"""A model whose weights are in a file beside it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from support.models import small


def scaled(path: Path, factor: float, data: str = "") -> tuple[bytes, bytes]:
    """Write y = factor · x, x FP32 [batch, 3], and its weights; return the content of the two files."""
    small.save(
        path,
        [small.node("Mul", "x w", "y")],
        [small.value("x")],
        [small.value("y")],
        {"w": np.full(3, factor, np.float32)},
    )
    location = data or f"{path.name}_data"
    model = onnx.load(str(path))
    onnx.save(
        model,
        str(path),
        save_as_external_data=True,
        all_tensors_to_one_file=True,
        location=location,
        size_threshold=0,
    )
    return path.read_bytes(), (path.parent / location).read_bytes()
