"""Parameters of messages, which have a field for each type of value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensorferry.server.errors import truncate
from tensorferry.server.transport.http.errors import HttpError

_FIELDS: Mapping[type, tuple[str, ...]] = {
    bool: ("bool_param",),
    str: ("string_param",),
    float: ("double_param",),
    int: ("int64_param", "uint64_param", "uint32_param"),
}


def set_parameter(parameters: Any, name: str, value: Any) -> None:
    """Set a parameter in a message's map. HttpError if the message has no field for such a value."""
    parameter = parameters[name]
    for field in _FIELDS.get(type(value), ()):
        if field in parameter.DESCRIPTOR.fields_by_name:
            try:
                setattr(parameter, field, value)
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
