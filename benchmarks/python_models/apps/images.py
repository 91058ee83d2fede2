"""JPEG files to the output of an image model: decoded and resized with Pillow in worker processes."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from python_models.pictures import SIZE, files, pixels
from tensorferry.serving import BYTES, UINT8, model, onnx, pipeline


@model(
    inputs={"jpeg": BYTES[-1]},
    outputs={"image": UINT8[-1, SIZE, SIZE, 3]},
    processes=int(os.environ["PYTHON_MODELS_PROCESSES"]),
    max_batch_size=4,  # A larger batch decodes no faster, and would keep files from idle processes.
    example={"jpeg": np.array(files(2), object)},
)
def decode(jpeg: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the pixels of a batch."""
    return np.stack([pixels(file) for file in jpeg])


# Served by its name as well, so that its own statistics tell how busy it is.
classifier = onnx(Path(os.environ["SERVING_BENCH_MODEL"]), name="classifier")
classify = pipeline("classify", decode, "classifier")
