"""Fields of JSON objects, and parameters of messages, which have a field for each type of value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tensorferry.server.errors import truncate
from tensorferry.server.transport.http.errors import HttpError
from tensorferry.server.wire import bounds

Fields = Mapping[str, Any]

# Values in a JSON text, because parsing and writing them stops all other threads: a million take up to 0.3 s. A message has
# the same bound for its typed contents.
MAX_VALUES = bounds.MAX_INTEGERS
HALF_A_PAIR = "a text of the request has half a surrogate pair"

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
