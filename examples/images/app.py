"""Pictures to labels: JPEG and PNG files are decoded in processes, and a model of 8 x 8 pixels classifies them.

Needs Pillow. Run: tensorferry serve app.py ../digits/digits.onnx
"""

import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from tensorferry.serving import BYTES, FP32, INT64, STRING, UINT8, InvalidInput, model, pipeline, step

HERE = Path(__file__).resolve().parent
SIZE = 8
LABELS = np.array((HERE / "labels.txt").read_text().split(), object)
PICTURES = [(HERE / name).read_bytes() for name in ("three.jpg", "zero.png")]

# A file of some kilobytes can have billions of pixels.
Image.MAX_IMAGE_PIXELS = 50_000_000
warnings.simplefilter("error", Image.DecompressionBombWarning)
# What Pillow raises for files that are damaged, of another format, or too large.
_UNREADABLE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError, Image.DecompressionBombWarning)


def pixels(file: bytes) -> Any:
    """Return a picture as the model takes it: from 0, paper, to 16, ink."""
    try:
        with Image.open(io.BytesIO(file), formats=("JPEG", "PNG")) as picture:
            picture.draft("L", (8 * SIZE, 8 * SIZE))
            grey = ImageOps.exif_transpose(picture).convert("L")
    except _UNREADABLE:
        raise InvalidInput(
            f"a file of {len(file)} bytes that begins with {file[:8]!r} cannot be read; send a JPEG or PNG file with at most "
            f"{Image.MAX_IMAGE_PIXELS} pixels"
        ) from None
    small = ImageOps.autocontrast(grey.resize((SIZE, SIZE)))
    return np.rint((255 - np.asarray(small, np.float32)) * (16 / 255)).astype(np.uint8)


@model(
    inputs={"file": BYTES[-1]},
    outputs={"image": UINT8[-1, SIZE, SIZE]},
    processes=2,
    max_batch_size=4,  # A larger batch is decoded no faster, and keeps files from idle processes.
    example={"file": np.array(PICTURES, object)},
)
def decode(file: Any) -> Any:
    """Return the pixels of a batch of files."""
    return np.stack([pixels(each) for each in file])


@model(
    inputs={"index": INT64[-1], "probabilities": FP32[-1, len(LABELS)]},
    outputs={"label": STRING[-1], "probability": FP32[-1]},
    steady=True,
)
def name(index: Any, probabilities: Any) -> Any:
    """Return the label of the best class, and its probability."""
    return LABELS[index], probabilities.max(axis=1)


classify = pipeline(
    "classify",
    decode,
    step("digits", outputs={"label": "index"}),
    name,
    outputs=["label", "probability", "probabilities"],
)
