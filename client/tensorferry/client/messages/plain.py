"""Protobuf messages as plain dicts."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import Message


def plain(message: Message) -> dict[str, Any]:
    """Return a message as a dict with every field, under the names of the .proto file.

    Messages become dicts, repeated fields lists, and enums their names. 64-bit integers stay int,
    unlike in protobuf's JSON. A message field that is not set is left out.
    """
    fields: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        if field.has_presence and not message.HasField(field.name):
            continue
        value = getattr(message, field.name)
        entry = field.message_type
        if entry is not None and entry.GetOptions().map_entry:
            of_value = entry.fields_by_name["value"]
            fields[field.name] = {key: _value(of_value, value[key]) for key in sorted(value)}
        elif _is_repeated(field):
            fields[field.name] = [_value(field, one) for one in value]
        else:
            fields[field.name] = _value(field, value)
    return fields


def _is_repeated(field: Any) -> bool:
    # Versions of protobuf before 6.31 lack `is_repeated`; later ones warn about `label`.
    if hasattr(field, "is_repeated"):
        return bool(field.is_repeated)
    return bool(field.label == field.LABEL_REPEATED)


def _value(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return plain(value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return value if known is None else known.name
    return value
