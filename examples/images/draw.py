"""Draw the pictures of this example: handwritten digits of examples/digits, one of each, as JPEG and PNG files.

Needs Pillow. Run: python draw.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

HERE = Path(__file__).resolve().parent
PAPER, INK = np.array([250, 246, 235]), np.array([32, 44, 96])
SIZE = 240


def main() -> None:
    """Write the first digit of each kind that the model was not trained on."""
    heldout = np.load(HERE.parent / "digits" / "heldout.npz")
    names = (HERE / "labels.txt").read_text().split()
    for digit, name in enumerate(names):
        ink = heldout["images"][np.flatnonzero(heldout["labels"] == digit)[3]][..., None] / 16
        colours = Image.fromarray((PAPER + ink * (INK - PAPER)).astype(np.uint8))
        picture = colours.resize((SIZE, SIZE), Image.Resampling.BICUBIC)
        if digit:
            picture.save(HERE / f"{name}.jpg", quality=85)
        else:
            picture.convert("L").save(HERE / f"{name}.png")


if __name__ == "__main__":
    main()
