"""Quantisation in a model's file, by the names of its operators."""

from __future__ import annotations

import mmap
from pathlib import Path

# A rounding step of 8 bits turns a difference in the last bit of a sum into one of this size.
PRECISION = 5e-2

CURE = (
    "it is quantised dynamically, by the values of all rows of a batch: quantise it statically "
    "(onnxruntime.quantization.quantize_static)"
)


def is_quantised(path: Path) -> bool:
    """Whether the model computes with quantised numbers."""
    return _contains(path, b"QuantizeLinear", b"QLinear")


def is_quantised_dynamically(path: Path) -> bool:
    """Whether the model chooses a scale of quantised numbers when it runs."""
    return _contains(path, b"DynamicQuantize")


def _contains(path: Path, *names: bytes) -> bool:
    if not path.stat().st_size:
        return False
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return any(data.find(name) >= 0 for name in names)
