"""Seeded weights of the models."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, numpy_helper


class Weights:
    """Initializers of a graph; `normal` draws one, `constant` takes one, and both return its name."""

    def __init__(self, seed: int = 0, dtype: npt.DTypeLike = np.float32) -> None:
        self.tensors: list[TensorProto] = []
        self.dtype = dtype
        self._random = np.random.default_rng(seed)

    def normal(self, name: str, shape: tuple[int, ...], deviation: float | None = None) -> str:
        """Add normally distributed weights; by default a product with them keeps the deviation."""
        scale = np.float32(1 / math.sqrt(shape[0]) if deviation is None else deviation)
        return self.constant(
            name, (self._random.standard_normal(shape, np.float32) * scale).astype(self.dtype)
        )

    def constant(self, name: str, value: object) -> str:
        """Add an array, or anything that numpy converts to one."""
        self.tensors.append(numpy_helper.from_array(np.asarray(value), name))
        return name
