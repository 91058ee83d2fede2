"""Values in JSON: fields of objects, parameters of messages, and the data of tensors."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from tensorferry.protos.tensors import DATATYPES, decode_raw
from tensorferry.server.errors import truncate
from tensorferry.server.transport.http.errors import HttpError
from tensorferry.server.wire import bounds

Fields = Mapping[str, Any]

# Values in a JSON text, because parsing and writing them stops all other threads: a million take up to 0.3 s. A message has
# the same bound for its typed contents.
MAX_VALUES = bounds.MAX_INTEGERS
HALF_A_PAIR = "a text of the request has half a surrogate pair"

# Of lists in the data of a tensor, as Triton has it.
_MAX_NESTING = 100
_TOO_DEEP = f"more than {_MAX_NESTING} lists are nested"
_WORDS = {
    bool: "a boolean",
    int: "an integer",
    float: "a number with a fraction or exponent",
    str: "a string",
    type(None): "null",
    dict: "an object",
    list: "a list",
}

# The fields of a parameter for each type of value.
_FIELDS: Mapping[type, tuple[str, ...]] = {
    bool: ("bool_param",),
    str: ("string_param",),
    float: ("double_param",),
    int: ("int64_param", "uint64_param", "uint32_param"),
}


def fields_of(body: bytes) -> Fields:
    """Return the JSON object in a body. HttpError if it is none, or has too many values."""
    # Commas and brackets in texts count too, because a closer look would cost as much as the parsing.
    if len(body) > MAX_VALUES and body.count(b",") + body.count(b"[") + body.count(b"{") > MAX_VALUES:
        raise HttpError(400, f"the JSON has more than {MAX_VALUES} values; send tensors as binary data")
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise HttpError(400, f"failed to parse the request JSON buffer: {error}") from None
    if not isinstance(fields, dict):
        raise HttpError(400, "the body must be a JSON object")
    return fields


def object_in(fields: Fields, name: str) -> Fields:
    """Return the object in a field; an empty one without the field. HttpError if it is no object."""
    value = fields.get(name, {})
    if not isinstance(value, dict):
        raise HttpError(400, f"{name!r} must be a JSON object")
    return value


def quoted(value: Any) -> str:
    """Return a value as JSON, so that a text has its quotes, or the words for a list or an object, for an error message."""
    if isinstance(value, (list, dict)):
        return _WORDS[type(value)]
    return truncate(json.dumps(value, ensure_ascii=False))


def checked_string(name: str, value: Any) -> str:
    """Return the value of the field `name`. HttpError if it is no string."""
    if not isinstance(value, str):
        raise HttpError(400, f"{name!r} is {quoted(value)}; it must be a string")
    return value


def checked_boolean(name: str, value: Any) -> bool:
    """Return the value of the field `name`. HttpError if it is no boolean."""
    if not isinstance(value, bool):
        raise HttpError(400, f"{name!r} is {quoted(value)}; it must be true or false")
    return value


def set_parameter(parameters: Any, name: str, value: Any) -> None:
    """Set a parameter in a message's map. HttpError if the message has no field for such a value."""
    parameter = parameters[name]
    for field in _FIELDS.get(type(value), ()):
        if field in parameter.DESCRIPTOR.fields_by_name:
            try:
                setattr(parameter, field, value)
            except UnicodeEncodeError:
                raise
            except ValueError:
                # The integer does not fit this field.
                continue
            return
    raise HttpError(
        400,
        f"parameter {truncate(name)!r} has invalid type. It should be either 'int', 'bool', 'double' or 'string'.",
    )


def value_of(parameter: Any) -> Any:
    """Return the value of a parameter."""
    return getattr(parameter, parameter.WhichOneof("parameter_choice"))


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
        raise _unfit(name, f"it has {len(values)} values, but its shape {list(shape)} has {count}")
    if kind == "BYTES":
        _check_types(name, kind, values, str)
        try:
            encoded = [text.encode() for text in values]
        except UnicodeEncodeError:
            raise _unfit(name, "half a surrogate pair") from None
        return b"".join([part for each in encoded for part in (len(each).to_bytes(4, "little"), each)])
    storage = datatype.storage
    if kind == "BOOL":
        _check_types(name, kind, values, bool)
        return np.array(values, storage).tobytes()
    if storage.kind in "iu":
        _check_types(name, kind, values, int)
        bounds = np.iinfo(storage)
        if values and not (bounds.min <= min(values) and max(values) <= bounds.max):
            raise _unfit(
                name,
                f"{kind} is from {bounds.min} to {bounds.max}, but the values are from {min(values)} to {max(values)}",
            )
        return np.array(values, storage).tobytes()
    _check_types(name, kind, values, int, float)
    try:
        with np.errstate(over="raise"):
            return np.array(values, np.float64).astype(storage).tobytes()
    except (OverflowError, FloatingPointError):
        raise _unfit(name, f"a value is too large for {kind}") from None


def _check_types(name: str, kind: str, values: Sequence[Any], *expected: type) -> None:
    # Exact types, because a boolean is an integer in Python.
    if wrong := set(map(type, values)).difference(expected):
        words = sorted(_WORDS[each] for each in wrong)
        raise _unfit(name, f"{kind} cannot have {' or '.join(words)}")


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
    raise _unfit(name, _TOO_DEEP)


def _collect(name: str, items: list[Any], flat: list[Any], levels: int) -> None:
    """Append the values in nested lists; each is visited once, so that deep lists beside many values cost no more."""
    if not levels:
        raise _unfit(name, _TOO_DEEP)
    for item in items:
        if type(item) is list:
            _collect(name, item, flat, levels - 1)
        else:
            flat.append(item)


def _unfit(name: str, reason: str) -> HttpError:
    return HttpError(400, f"Unable to parse 'data' of input {name!r}: {reason}")


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
