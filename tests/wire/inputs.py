"""Inputs as tritonclient makes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import tritonclient.grpc as triton

# Work for the probe model that takes it seconds.
SLOW = 20_000


def tensor(name: str, array: Any, datatype: str) -> triton.InferInput:
    """An input with raw contents."""
    given = triton.InferInput(name, list(array.shape), datatype)
    given.set_data_from_numpy(array)
    return given


def probe(tag: int, *, index: int = 0, work: int = 0) -> list[triton.InferInput]:
    """The inputs of the probe model, whose answer is 2 tag + index, after so much work."""
    return [
        tensor("work", np.array([work], np.int64), "INT64"),
        tensor("x", np.full((1, 4), tag, np.float32), "FP32"),
        tensor("index", np.array([index]), "INT64"),
    ]
