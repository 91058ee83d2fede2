"""Models without shapes of their inputs and outputs, which ONNX Runtime accepts."""

from __future__ import annotations

from pathlib import Path

import onnx
from support.models.small import written


def shapeless(path: Path) -> Path:
    """Return the model without shapes, except those of inputs whose axis 0 is a batch axis `n`."""
    model = onnx.load(path)
    for given in (*model.graph.input, *model.graph.output):
        dims = given.type.tensor_type.shape.dim
        if given in model.graph.output or not dims or dims[0].dim_param != "n":
            given.type.tensor_type.ClearField("shape")
    onnx.save(model, str(path))
    return path


def doubled(path: Path) -> Path:
    """x FP32 of any rank → y FP32 of any rank, twice x."""
    return shapeless(written(path, "(float[any] x) => (float[any] y) { y = Add (x, x) }"))
