"""Inputs and requested outputs of tritonclient."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import tritonclient.grpc as triton

# The numpy types of tritonclient, by datatype.
DATATYPES: dict[str, Any] = {
    "BOOL": np.bool_, "INT8": np.int8, "INT16": np.int16, "INT32": np.int32, "INT64": np.int64,
    "UINT8": np.uint8, "UINT16": np.uint16, "UINT32": np.uint32, "UINT64": np.uint64, "FP16": np.float16,
    "FP32": np.float32, "FP64": np.float64, "BF16": ml_dtypes.bfloat16, "BYTES": np.object_,
}  # fmt: skip


def tensor(name: str, array: Any, datatype: str) -> triton.InferInput:
    """Return an input with raw contents."""
    given = triton.InferInput(name, list(array.shape), datatype)
    given.set_data_from_numpy(array)
    return given


def probe(tag: int = 0, index: int = 0, work: int = 0, rows: int = 1) -> list[triton.InferInput]:
    """Return the inputs of the probe model: it answers 2 tag + index, fails for an index above 9, and
    is slow for large work.
    """
    return [
        tensor("work", np.full(rows, work), "INT64"),
        tensor("x", np.full((rows, 4), tag, np.float32), "FP32"),
        tensor("index", np.full(rows, index), "INT64"),
    ]


def given(region: str, shape: list[int], nbytes: int, kind: str = "INT32") -> triton.InferInput:
    """Return the input x of an echo model, in a region of shared memory."""
    placed = triton.InferInput("x", shape, kind)
    placed.set_shared_memory(region, nbytes)
    return placed


def wanted(region: str, nbytes: int) -> triton.InferRequestedOutput:
    """Return the requested output y, in a region of shared memory."""
    placed = triton.InferRequestedOutput("y")
    placed.set_shared_memory(region, nbytes)
    return placed
