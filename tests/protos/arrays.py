"""One array of each datatype, with its extremes, in `storage` form."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tensorferry.protos.tensors import DATATYPES


def sample(name: str) -> npt.NDArray[Any]:
    """Return an array of shape [2, 3]."""
    storage = DATATYPES[name].storage
    if name == "BYTES":
        return np.array([[b"", b"plain", "é".encode()], [b"\0", b"a\0b\0", b"\xff\xfe" * 300]], dtype=object)
    if name == "BOOL":
        return np.array([[True, False, True], [False, False, True]])
    if name == "BF16":
        return np.array([[0x0000, 0x8000, 0x3F80], [0x7F80, 0x7FC0, 0xFF7F]], dtype=storage)
    if storage.kind == "f":
        info = np.finfo(storage)
        return np.array([[0.0, -0.0, info.tiny], [info.max, -np.inf, np.nan]], dtype=storage)
    bounds = np.iinfo(storage)
    return np.array([[0, 1, 2], [bounds.min, bounds.max, bounds.max - 1]], dtype=storage)


def same(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> bool:
    """Return whether dtype, shape and every bit are equal."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    if a.dtype == object:
        return a.reshape(-1).tolist() == b.reshape(-1).tolist()
    return a.tobytes() == b.tobytes()
