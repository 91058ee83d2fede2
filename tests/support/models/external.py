"""A model whose weights are in a file beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from support.models import small


def scaled(path: Path, factor: float, data: str = "") -> tuple[bytes, bytes]:
    """Write y = factor · x, x FP32 [batch, 3], and its weights; return the content of the two files."""
    text = "(float[batch, 3] x) => (float[batch, 3] y) { y = Mul (x, w) }"
    small.written(path, text, w=np.full(3, factor, np.float32))
    location = data or f"{path.name}_data"
    external: dict[str, Any] = {
        "save_as_external_data": True,
        "all_tensors_to_one_file": True,
        "size_threshold": 0,
    }
    onnx.save(onnx.load(str(path)), str(path), location=location, **external)
    return path.read_bytes(), (path.parent / location).read_bytes()
