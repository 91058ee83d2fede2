"""Answers of `tensorferry infer` as text: a table for people, and the protocol's JSON form for programs."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from tensorferry.client.messages.checks import FLOATS
from tensorferry.client.messages.printable import printable
from tensorferry.client.messages.results import InferenceResult
from tensorferry.protos import tensors
from tensorferry.protos.tensors import Array

# Arrays with more elements are shortened to the first and last of each axis.
_MOST_ELEMENTS = 200
_EDGE_ELEMENTS = 3
# Longest text of an element of BYTES, in characters.
_LONGEST_TEXT = 80


def table(result: InferenceResult, width: int) -> Iterator[str]:
    """Yield lines that show an answer: each output's datatype and shape, and its values, shortened if long."""
    for name, array in result.items():
        yield heading(name, array)
        yield np.array2string(
            array.astype(np.float32) if tensors.datatype_of(array) == "BF16" else array,
            max_line_width=width,
            threshold=_MOST_ELEMENTS,
            edgeitems=_EDGE_ELEMENTS,
            separator=", " if array.dtype == object else " ",
            formatter={"object": _text},
        )


def title(result: InferenceResult) -> str:
    """Return the model and its version."""
    return f"model {printable(result.model_name)}, version {printable(result.model_version or '-')}"


def heading(name: str, array: Array) -> str:
    """Return an output's name, datatype and shape."""
    return f"{printable(name)}  {tensors.datatype_of(array)} {list(array.shape)}"


def json_text(result: InferenceResult) -> str:
    """Return an answer as the protocol's JSON object on one line, with the values in row-major order.

    BYTES are strings if they are UTF-8, otherwise {"b64": ...}. Floats that JSON lacks are the
    strings 'NaN', 'Infinity' and '-Infinity'.
    """
    answer: dict[str, object] = {"model_name": result.model_name, "model_version": result.model_version}
    if result.id:
        answer["id"] = result.id
    if result.parameters:
        answer["parameters"] = {
            name: _float(value) if isinstance(value, float) else value
            for name, value in result.parameters.items()
        }
    answer["outputs"] = [
        {
            "name": name,
            "datatype": tensors.datatype_of(array),
            "shape": list(array.shape),
            "data": _data(array),
        }
        for name, array in result.items()
    ]
    return json.dumps(answer, allow_nan=False)


def _data(array: Array) -> list[object]:
    if array.dtype == object:
        return [_element(element) for element in array.flat]
    if tensors.datatype_of(array) not in FLOATS:
        return array.ravel().tolist()
    values: list[float] = array.astype(np.float64).ravel().tolist()
    return [_float(value) for value in values]


def _float(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _element(element: bytes) -> str | dict[str, str]:
    try:
        return element.decode()
    except UnicodeDecodeError:
        return {"b64": base64.b64encode(element).decode()}


def _text(element: Any) -> str:
    try:
        shown = repr(element.decode())
    except UnicodeDecodeError:
        shown = repr(element)
    if len(shown) > _LONGEST_TEXT:
        return f"{shown[: _LONGEST_TEXT - 20]}... ({len(element)} bytes)"
    return shown
