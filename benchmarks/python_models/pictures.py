"""JPEG files, and the pixels that an image model gets from them. Needs Pillow."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

SIZE = 224
_SHOT = (640, 480)
_QUALITY = 90


def files(count: int) -> list[bytes]:
    """Return different pictures of soft colors, as JPEG files of about 60 KB."""
    random = np.random.default_rng(3)
    found = []
    for _ in range(count):
        colors = Image.fromarray(random.integers(0, 255, (30, 40, 3), np.uint8))
        found.append(buffer := io.BytesIO())
        colors.resize(_SHOT, Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=_QUALITY)
    return [buffer.getvalue() for buffer in found]


def pixels(file: bytes) -> npt.NDArray[Any]:
    """Return the pixels of one file in the model's size: [224, 224, 3]."""
    with Image.open(io.BytesIO(file)) as image:
        return np.asarray(image.convert("RGB").resize((SIZE, SIZE)))
