"""Memory after requests with many distinct shapes."""

from __future__ import annotations

import gc
import tracemalloc
from functools import partial

import numpy as np
from support.models.small import written
from support.server.rig import Load, infer, request

from tensorferry.server.inference.service import InferenceService
from tensorferry.server.models.lifecycle.registry import ModelRegistry

_MIB = 1 << 20
# Distinct shapes of one half, more than any cache holds.
_SHAPES = 600


def test_memory_does_not_grow_with_the_number_of_shapes(load: Load) -> None:
    text = "(float[batch, height, width] x) => (float[batch, height, width] y) { y = Identity (x) }"
    registry = ModelRegistry()
    registry.mark_ready(load(partial(written, text=text)))
    service = InferenceService(registry)

    def run(indices: range) -> int:
        """Run a request of each shape. Return the bytes that Python has allocated."""
        for index in indices:
            infer(service, request({"x": np.zeros((1, 1 + index % 100, 1 + index // 100), np.float32)}))
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    try:
        run(range(100))
        tracemalloc.start()
        half = run(range(100, _SHAPES))
        whole = run(range(_SHAPES, 2 * _SHAPES))
    finally:
        tracemalloc.stop()
    assert whole - half < _MIB / 2
