"""Seeded weights for the models."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, numpy_helper


class Weights:
    """Initializers of a graph; `normal` draws one and `constant` takes one, both return its name."""

    def __init__(self, seed: int = 0, dtype: npt.DTypeLike = np.float32) -> None:
        self.tensors: list[TensorProto] = []
        self.dtype = dtype
        self._random = np.random.default_rng(seed)

    def normal(self, name: str, shape: tuple[int, ...], deviation: float | None = None) -> str:
        """Normally distributed; by default such that a product with it keeps the deviation."""
        scale = np.float32(1 / math.sqrt(shape[0]) if deviation is None else deviation)
        return self.constant(
            name, (self._random.standard_normal(shape, np.float32) * scale).astype(self.dtype)
        )

    def constant(self, name: str, value: object) -> str:
        """An array, or what makes one."""
        self.tensors.append(numpy_helper.from_array(np.asarray(value), name))
        return name
