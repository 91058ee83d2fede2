"""Two tiny models, alone and with an empty step of Python between them."""

import os
from pathlib import Path
from typing import Any

import numpy.typing as npt

from tensorferry.serving import FP32, model, onnx, pipeline, step

_MODELS = Path(os.environ["SERVING_BENCH_MODEL"])
_first, _second = onnx(_MODELS / "first.onnx"), onnx(_MODELS / "second.onnx")


@model(inputs={"hidden": FP32[-1, 64]}, outputs={"same": FP32[-1, 64]})
def empty(hidden: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the batch as it is."""
    return hidden


without = pipeline("without", step(_first, outputs={"y": "hidden"}), step(_second, inputs={"x": "hidden"}))
with_step = pipeline(
    "step", step(_first, outputs={"y": "hidden"}), empty, step(_second, inputs={"x": "same"})
)
