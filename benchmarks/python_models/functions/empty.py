"""Function that does nothing, so that a server's own cost shows."""

from typing import Any

import numpy.typing as npt

WIDTH = 64


def empty(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the batch as it is."""
    return x
