"""Two tiny models, alone and with one or two empty steps of Python between them."""

import os
from pathlib import Path
from typing import Any

import numpy.typing as npt

from tensorferry.serving import FP32, model, onnx, pipeline, step

_MODELS = Path(os.environ["SERVING_BENCH_MODEL"])
_first, _second = onnx(_MODELS / "first.onnx"), onnx(_MODELS / "second.onnx")


@model(inputs={"hidden": FP32[-1, 64]}, outputs={"same": FP32[-1, 64]}, steady=True)
def empty(hidden: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the batch as it is."""
    return hidden


@model(inputs={"same": FP32[-1, 64]}, outputs={"still_same": FP32[-1, 64]}, steady=True)
def another(same: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the batch as it is."""
    return same


_before = step(_first, outputs={"y": "hidden"})
without = pipeline("without", _before, step(_second, inputs={"x": "hidden"}))
one = pipeline("step", _before, empty, step(_second, inputs={"x": "same"}))
two = pipeline("two", _before, empty, another, step(_second, inputs={"x": "still_same"}))
