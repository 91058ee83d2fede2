"""Results as tables: dicts of lists, pandas DataFrames, pyarrow tables."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from tensorferry.client.errors import InvalidInput
from tensorferry.protos.tensors import Array


def lists(outputs: Mapping[str, Array], text: bool) -> dict[str, Any]:
    """Return each output as nested lists of Python values."""
    return {name: _plain(name, array, text).tolist() for name, array in outputs.items()}


def columns(outputs: Mapping[str, Array], text: bool) -> dict[str, Any]:
    """Return the columns of the outputs.

    An output with one axis is a column. One with two axes is a column for each place of the second
    axis: "NAME_0", "NAME_1" and so on, or "NAME" for a single place. One with more is a column of
    nested lists.
    """
    found: dict[str, Any] = {}
    sizes = {name: array.shape[0] if array.ndim else None for name, array in outputs.items()}
    if len(set(sizes.values())) > 1 or None in sizes.values():
        received = ", ".join(f"{name!r} {list(array.shape)}" for name, array in outputs.items())
        raise InvalidInput(
            "a table of the result",
            "outputs with the same number of rows",
            received,
            "choose some of them with outputs=",
        )
    for name, array in outputs.items():
        plain = _plain(name, array, text)
        parts: dict[str, Any] = {name: plain}
        if plain.ndim == 2 and plain.shape[1] == 1:
            parts = {name: plain[:, 0]}
        elif plain.ndim == 2:
            parts = {f"{name}_{place}": plain[:, place] for place in range(plain.shape[1])}
        elif plain.ndim > 2:
            parts = {name: plain.tolist()}
        for column, values in parts.items():
            if column in found:
                raise InvalidInput(
                    "a table of the result",
                    "columns with different names",
                    f"{column!r} twice",
                    "choose some of the outputs with outputs=",
                )
            found[column] = values
    return found


def library(name: str, method: str) -> Any:
    """Return an optional library; raise ImportError that says how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ImportError(f"{method} needs {name}, which is not installed: pip install {name}") from None


def _plain(name: str, array: Array, text: bool) -> Array:
    if array.dtype != object:
        # BF16 of ml_dtypes is no dtype of numpy's own; FP32 holds all its values.
        return array.astype(np.float32) if array.dtype.name == "bfloat16" else array
    if not text:
        return array
    decoded = np.empty(array.shape, object)
    for place, value in np.ndenumerate(array):
        try:
            decoded[place] = value.decode()
        except UnicodeDecodeError:
            raise InvalidInput(
                f"output {name!r} as text",
                "UTF-8",
                f"{value[:40]!r} at {list(place)}",
                "use text=False for bytes",
            ) from None
    return decoded
