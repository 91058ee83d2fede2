"""Conversion of values given to a shell command to the datatype and shape of a model's input.

Pure functions. All raise `InvalidInput`, which names the input, what was given and what was expected.
"""

from __future__ import annotations

import base64
import binascii
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tensorferry.client.errors import InvalidInput
from tensorferry.client.messages.arguments import shown
from tensorferry.client.messages.checks import FLOATS, dtype_for
from tensorferry.client.messages.metadata import TensorMetadata, subject_of
from tensorferry.protos import tensors
from tensorferry.protos.tensors import Array

# JSON has no numbers for these. The names are those of protobuf's JSON form.
SPECIAL_FLOATS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def array_of(value: object, tensor: TensorMetadata, model: str, shape: Sequence[int] | None = None) -> Array:
    """Return a value as an array of the input's datatype and shape.

    The value is an array, `bytes`, or what JSON has: nested lists of numbers, booleans and strings. An
    object {"b64": ...} is an element of BYTES in base64. Integers must fit exactly; floats round
    to the nearest value of the datatype. Missing leading axes are added with length 1, unless
    `shape` states the shape of the value's elements.
    """
    subject = subject_of(tensor, model)
    dtype = dtype_for(tensor, subject)
    if isinstance(value, np.ndarray):
        given, array = value.shape, _cast(value, tensor, dtype, subject)
    else:
        given, flat = _flattened(value, tensor, subject)
        array = _converted(flat, given, tensor, dtype, subject)
    if shape is not None:
        if math.prod(shape) != array.size:
            received = f"{array.size} elements of shape {list(given)} for the shape {list(shape)}"
            raise InvalidInput(subject, str(tensor), received, f"give {math.prod(shape)} elements")
        given = tuple(shape)
    return array.reshape(_fitted(given, tensor, subject, exactly=shape is not None))


def _flattened(value: object, tensor: TensorMetadata, subject: str) -> tuple[tuple[int, ...], list[object]]:
    """Return the shape of nested lists, and their elements in row-major order."""
    shape: list[int] = []
    level = [value]
    while level and any(isinstance(one, list) for one in level):
        lists = [one for one in level if isinstance(one, list)]
        sizes = sorted({len(one) for one in lists})
        if len(lists) < len(level) or len(sizes) > 1:
            received = (
                f"lists of {sizes[0]} and of {sizes[-1]} elements side by side"
                if len(sizes) > 1
                else "a list and single values side by side"
            )
            raise InvalidInput(subject, str(tensor), received, "give all lists of an axis the same length")
        shape.append(sizes[0])
        level = [element for one in lists for element in one]
    return tuple(shape), level


def _fitted(
    given: tuple[int, ...], tensor: TensorMetadata, subject: str, *, exactly: bool
) -> tuple[int, ...]:
    """Return the shape of the array to send; raise InvalidInput if it does not fit the model's."""
    expected = tensor.shape
    shape = given
    if not exactly and len(given) < len(expected):
        if 0 in given:
            # [] says nothing about the axes behind the one without elements.
            shape = given + tuple(max(size, 0) for size in expected[len(given) :])
        elif all(size in (-1, 1) for size in expected[: len(expected) - len(given)]):
            shape = (1,) * (len(expected) - len(given)) + given
    if len(shape) != len(expected):
        change = f"give it {len(expected)} axes, not {len(given)}"
    else:
        wrong = [axis for axis, size in enumerate(expected) if size not in (-1, shape[axis])]
        if not wrong:
            return shape
        change = ", ".join(f"axis {axis} must be {expected[axis]} long, not {shape[axis]}" for axis in wrong)
    raise InvalidInput(subject, str(tensor), f"the shape {list(given)}", change)


def _cast(array: Array, tensor: TensorMetadata, dtype: np.dtype[Any], subject: str) -> Array:
    """Return an array of another dtype with the input's, by the rules for lists."""
    try:
        datatype = tensors.datatype_of(array)
    except tensors.TensorError as error:
        raise InvalidInput(subject, str(tensor), f"an array of numpy's {array.dtype}", str(error)) from None
    if datatype == tensor.datatype:
        return array
    if datatype in FLOATS and tensor.datatype in FLOATS:
        return _rounded(array, tensor, dtype, subject)
    return _converted(array.ravel().tolist(), array.shape, tensor, dtype, subject)


def _converted(
    flat: list[Any], shape: tuple[int, ...], tensor: TensorMetadata, dtype: np.dtype[Any], subject: str
) -> Array:
    """Return the elements as an array of one axis."""
    convert: Callable[[object], object]
    if tensor.datatype == "BYTES":
        convert = _bytes
    elif tensor.datatype == "BOOL":
        convert = _boolean
    elif tensor.datatype in FLOATS:
        convert = _float
    else:
        limits = np.iinfo(dtype)
        least, most = int(limits.min), int(limits.max)

        convert = functools.partial(_integer, datatype=tensor.datatype, least=least, most=most)

    elements = []
    for index, element in enumerate(flat):
        try:
            elements.append(convert(element))
        except ValueError as error:
            received = shown(element) + _place(index, shape)
            raise InvalidInput(subject, str(tensor), received, str(error)) from None
    if tensor.datatype == "BYTES":
        array = np.empty(len(elements), object)
        array[:] = elements
        return array
    if tensor.datatype in FLOATS:
        wide = np.array(elements, np.float64)
        return _rounded(wide.reshape(shape), tensor, dtype, subject).ravel()
    return np.array(elements, dtype)


def _rounded(array: Array, tensor: TensorMetadata, dtype: np.dtype[Any], subject: str) -> Array:
    with np.errstate(over="ignore"):  # the comparison below finds values that do not fit
        cast = array.astype(dtype)
    lost = np.isfinite(array) & ~np.isfinite(cast)
    if lost.any():
        index = int(np.flatnonzero(lost)[0])
        received = shown(float(array.ravel()[index])) + _place(index, array.shape)
        change = f"{tensor.datatype} has no number that large; send 'Infinity', or a smaller number"
        raise InvalidInput(subject, str(tensor), received, change)
    return cast


def _place(index: int, shape: tuple[int, ...]) -> str:
    return f" at {[int(i) for i in np.unravel_index(index, shape)]}" if shape else ""


def _bytes(element: object) -> bytes:
    if isinstance(element, bytes):
        return element
    if isinstance(element, str):
        try:
            return element.encode()
        except UnicodeEncodeError:
            raise ValueError("the string has lone surrogates, which UTF-8 cannot encode") from None
    if isinstance(element, dict) and list(element) == ["b64"] and isinstance(element["b64"], str):
        try:
            return base64.b64decode(element["b64"], validate=True)
        except binascii.Error as error:
            raise ValueError(f'"b64" is no base64 ({error})') from None
    raise ValueError('write strings in quotes, or {"b64": "..."} for bytes in base64')


def _boolean(element: object) -> bool:
    if isinstance(element, (bool, int, float)) and element in (0, 1):
        return bool(element)
    raise ValueError("write true or false")


def _integer(element: object, datatype: str, least: int, most: int) -> int:
    if not isinstance(element, (bool, int, float)):
        raise ValueError("write integers")
    if isinstance(element, float) and not element.is_integer():
        raise ValueError("write integers; round it first")
    if not least <= element <= most:
        raise ValueError(f"{datatype} holds {least} to {most}")
    return int(element)


def _float(element: object) -> float:
    if isinstance(element, str) and element in SPECIAL_FLOATS:
        return SPECIAL_FLOATS[element]
    if isinstance(element, (bool, int, float)):
        try:
            return float(element)
        except OverflowError:
            raise ValueError("write numbers that a float can hold") from None
    raise ValueError("write numbers, or 'NaN', 'Infinity' and '-Infinity' in quotes")
