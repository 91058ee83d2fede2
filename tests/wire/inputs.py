"""Inputs as tritonclient makes them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import tritonclient.grpc as triton
from onnx import TensorProto

# By the protocol's names: ONNX's element type, and the numpy type that tritonclient takes.
DATATYPES: dict[str, tuple[int, Any]] = {
    "BOOL": (TensorProto.BOOL, np.bool_),
    "INT8": (TensorProto.INT8, np.int8),
    "INT16": (TensorProto.INT16, np.int16),
    "INT32": (TensorProto.INT32, np.int32),
    "INT64": (TensorProto.INT64, np.int64),
    "UINT8": (TensorProto.UINT8, np.uint8),
    "UINT16": (TensorProto.UINT16, np.uint16),
    "UINT32": (TensorProto.UINT32, np.uint32),
    "UINT64": (TensorProto.UINT64, np.uint64),
    "FP16": (TensorProto.FLOAT16, np.float16),
    "FP32": (TensorProto.FLOAT, np.float32),
    "FP64": (TensorProto.DOUBLE, np.float64),
    "BF16": (TensorProto.BFLOAT16, ml_dtypes.bfloat16),
    "BYTES": (TensorProto.STRING, np.object_),
}

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
