"""Tensor data as JSON: from the values in a request to raw contents, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from tensorferry.protos.tensors import DATATYPES, decode_raw
from tensorferry.server.transport.http.errors import HttpError
from tensorferry.server.transport.http.json_fields import MAX_VALUES

# Triton's limit.
_MAX_NESTING = 100
_WORDS = {bool: "a boolean", str: "a string", type(None): "null", dict: "an object", list: "a list"}


def raw_contents(name: str, kind: str, shape: Sequence[int], data: Any) -> bytes:
    """Return the raw contents of an input of this datatype and shape whose values are `data`, nested or flat.

    HttpError if the values do not fit.
    """
    datatype = DATATYPES.get(kind)
    if datatype is None or datatype.contents is None:
        raise HttpError(
            400,
            f"input {name!r}: receiving {kind} data via JSON is not supported; send it as binary data, or use one of "
            + ", ".join(each.name for each in DATATYPES.values() if each.contents is not None),
        )
    values = _flat(name, data)
    count = math.prod(shape)
    if len(values) != count:
        raise HttpError(
            400,
            f"Unable to parse 'data' of input {name!r}: it has {len(values)} values, but its shape {list(shape)} has {count}",
        )
    if kind == "BYTES":
        _check_types(name, kind, values, str)
        try:
            encoded = [text.encode() for text in values]
        except UnicodeEncodeError:
            raise HttpError(400, f"Unable to parse 'data' of input {name!r}: half a surrogate pair") from None
        return b"".join([part for each in encoded for part in (len(each).to_bytes(4, "little"), each)])
    storage = datatype.storage
    if kind == "BOOL":
        _check_types(name, kind, values, bool)
        return np.array(values, storage).tobytes()
    if storage.kind in "iu":
        _check_types(name, kind, values, int)
        bounds = np.iinfo(storage)
        if values and not (bounds.min <= min(values) and max(values) <= bounds.max):
            raise HttpError(
                400,
                f"Unable to parse 'data' of input {name!r}: {kind} is from {bounds.min} to {bounds.max}, but the values are "
                f"from {min(values)} to {max(values)}",
            )
        return np.array(values, storage).tobytes()
    _check_types(name, kind, values, int, float)
    try:
        with np.errstate(over="raise"):
            return np.array(values, np.float64).astype(storage).tobytes()
    except (OverflowError, FloatingPointError):
        raise HttpError(
            400, f"Unable to parse 'data' of input {name!r}: a value is too large for {kind}"
        ) from None


def _check_types(name: str, kind: str, values: Sequence[Any], *expected: type) -> None:
    # Exact types, because a boolean is an integer in Python.
    if wrong := set(map(type, values)).difference(expected):
        words = sorted(_WORDS.get(each, "a number with a fraction or exponent") for each in wrong)
        raise HttpError(
            400, f"Unable to parse 'data' of input {name!r}: {kind} cannot have {' or '.join(words)}"
        )


def _flat(name: str, data: Any) -> list[Any]:
    """Return the values in row-major order. Levels of nesting may be mixed, as in Triton."""
    values = data if isinstance(data, list) else [data]
    for level in range(_MAX_NESTING):
        kinds = set(map(type, values))
        if list not in kinds:
            return values
        if len(kinds) > 1:
            flat: list[Any] = []
            _collect(name, values, flat, _MAX_NESTING - level)
            return flat
        values = list(chain.from_iterable(values))
    raise _too_deep(name)


def _collect(name: str, items: list[Any], flat: list[Any], levels: int) -> None:
    """Append the values in nested lists; each is visited once, so that deep lists beside many values cost no more."""
    if not levels:
        raise _too_deep(name)
    for item in items:
        if type(item) is list:
            _collect(name, item, flat, levels - 1)
        else:
            flat.append(item)


def _too_deep(name: str) -> HttpError:
    return HttpError(
        400, f"Unable to parse 'data' of input {name!r}: more than {_MAX_NESTING} lists are nested"
    )


def json_values(name: str, kind: str, shape: Sequence[int], raw: bytes) -> list[Any]:
    """Return the values of an output, given its raw contents, as one flat list.

    HttpError if a string is not UTF-8, or there are too many values.
    """
    if math.prod(shape) > MAX_VALUES:
        raise HttpError(
            400,
            f"output {name!r} has more than {MAX_VALUES} values, so JSON cannot have it: use binary_data=True",
        )
    array = decode_raw(raw, DATATYPES[kind], shape).ravel()
    if kind == "BF16":
        array = (array.astype("<u4") << 16).view("<f4")
    elif kind == "BYTES":
        try:
            return [element.decode() for element in array]
        except UnicodeDecodeError:
            raise HttpError(
                500,
                f"output {name!r} has a string that is not UTF-8, so JSON cannot have it: use binary_data=True",
            ) from None
    values: list[Any] = array.tolist()
    return values
