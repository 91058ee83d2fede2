"""Mutation of good inputs: of bytes, or of message fields, so that the result still parses.

The given random numbers decide everything, so the same numbers make the same inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from fuzz.target import Target
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_INTEGERS = (
    0, 1, 2, 3, 4, 5, 7, 8, 12, 16, 24, 32, 64, 100, 127, 128, 255, 256, 1000, 65535, 1 << 31, 1 << 32,
)  # fmt: skip
_HUGE = ((1 << 31) - 1, (1 << 32) - 1, 1 << 60, 1 << 62, (1 << 63) - 1, (1 << 64) - 1)
_FLOATS = (0.0, -0.0, 1.0, -1.5, 1e-45, 3.4e38, 1e308, float("inf"), float("-inf"), float("nan"))
_TEXTS = (
    "", " ", "0", "1", "-1", "x", "é", "\0", "a\nb", "../../etc/passwd", "/", ".", "..", "a/b", "a" * 129, "a" * 1100,
    "\u202e", "\U0001f600", "%s%n", "{}", "9" * 30, "1e999", "nan", "true", "{'", '{"a":', "name: 'x", "file:1/m.onnx",
)  # fmt: skip
_BLOBS = (
    b"", b"\0", b"\xff" * 4, b"\0" * 4, b"\1\0\0\0a", b"\xff\xff\xff\x7f", b"\xc3\x28", b"\0" * 12,
    b"a" * 64,
)  # fmt: skip
_MOST_ELEMENTS = 64

_SIGNED = {FieldDescriptor.CPPTYPE_INT32: 31, FieldDescriptor.CPPTYPE_INT64: 63}
_UNSIGNED = {FieldDescriptor.CPPTYPE_UINT32: 32, FieldDescriptor.CPPTYPE_UINT64: 64}


def mutant(random: Random, target: Target, parents: Sequence[bytes]) -> bytes:
    """Return an input made from one or two of the parents."""
    data = random.choice(parents)
    if random.random() < 0.6:
        changed = with_fields_changed(random, target, data, random.choice(parents))
        if changed is not None:
            return changed if random.random() < 0.8 else with_bytes_changed(random, changed)
    return with_bytes_changed(random, data, random.choice(parents))


def with_bytes_changed(random: Random, data: bytes, other: bytes = b"") -> bytes:
    """Return the data with some bytes set, inserted, deleted, repeated, moved, or copied from the
    other input.
    """
    made = bytearray(data)
    for _ in range(random.choice((1, 1, 1, 2, 2, 3, 5))):
        at = random.randrange(len(made) + 1)
        size = random.choice((1, 1, 2, 4, 8, 20))
        match random.randrange(8):
            case 0 if at < len(made):
                made[at] = random.randrange(256)
            case 1 if at < len(made):
                made[at] ^= 1 << random.randrange(8)
            case 2:
                made[at:at] = random.randbytes(size)
            case 3:
                del made[at : at + size]
            case 4:
                del made[at:]
            case 5:
                made[at:at] = made[at : at + size] * random.choice((1, 2, 10))
            case 6:
                start = random.randrange(len(other) + 1)
                made[at : at + size] = other[start : start + random.choice((4, 16, 64))]
            case _:
                made[at : at + size] = random.choice((b"\xff", b"\x7f", b"\0", b"\x80")) * size
    return bytes(made)


def with_fields_changed(random: Random, target: Target, data: bytes, other: bytes) -> bytes | None:
    """Return the message with some fields changed; None if the data has no message."""
    front, kind = target.shape(data)
    if kind is None:
        return target.changed(random, data)
    try:
        message = kind.FromString(data[len(front) :])
    except Exception:
        return None
    for _ in range(random.choice((1, 1, 1, 2, 2, 3, 6))):
        _change(random, message, target.words)
    if random.random() < 0.05:
        other_front, other_kind = target.shape(other)
        if other_kind is kind:
            try:
                message.MergeFrom(kind.FromString(other[len(other_front) :]))
            except Exception:
                pass
    return bytes(front + message.SerializeToString(deterministic=True))


def _change(random: Random, message: Message, words: Sequence[str]) -> None:
    """Change a field of the message, or of a nested message."""
    fields = message.DESCRIPTOR.fields
    if not fields:
        return
    present = [field for field, _ in message.ListFields()]
    # Mostly a present field, because most absent fields are not read.
    field: Any = random.choice(present if present and random.random() < 0.75 else fields)
    if random.random() < 0.08:
        message.ClearField(field.name)
    elif field.message_type is not None and field.message_type.GetOptions().map_entry:
        _change_map(random, getattr(message, field.name), field, words)
    elif field.is_repeated:
        _change_list(random, getattr(message, field.name), field, words)
    elif field.message_type is not None:
        inner = getattr(message, field.name)
        if random.random() < 0.2:
            inner.SetInParent()
        else:
            _change(random, inner, words)
    else:
        setattr(message, field.name, _value(random, field, words, getattr(message, field.name)))


def _change_map(random: Random, entries: Any, field: Any, words: Sequence[str]) -> None:
    key_field, value_field = (
        field.message_type.fields_by_name["key"],
        field.message_type.fields_by_name["value"],
    )
    # The iteration order of a mapping differs between processes.
    keys = sorted(entries)
    if keys and random.random() < 0.15:
        del entries[random.choice(keys)]
        return
    key = random.choice(keys) if keys and random.random() < 0.6 else _value(random, key_field, words, None)
    if value_field.message_type is not None:
        _change(random, entries[key], words)
    else:
        entries[key] = _value(random, value_field, words, None)


def _change_list(random: Random, values: Any, field: Any, words: Sequence[str]) -> None:
    size = len(values)
    action = random.random()
    if size and action < 0.15:
        del values[random.randrange(size)]
    elif size > 1 and action < 0.25:
        kept = list(values)
        random.shuffle(kept)
        del values[:]
        values.extend(kept)
    elif size and action < 0.35 and size < _MOST_ELEMENTS:
        values.extend([values[random.randrange(size)]] * random.choice((1, 1, 2, 30)))
    elif field.message_type is not None:
        _change(random, values[random.randrange(size)] if size and action < 0.9 else values.add(), words)
    elif size and action < 0.85:
        at = random.randrange(size)
        values[at] = _value(random, field, words, values[at])
    elif size < _MOST_ELEMENTS:
        values.append(_value(random, field, words, None))


def _value(random: Random, field: Any, words: Sequence[str], now: Any) -> Any:
    """Return a value for the field; for a number or bytes often one like `now`, its present value."""
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return random.random() < 0.5
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return random.choice(_FLOATS) if random.random() < 0.7 else random.uniform(-1e6, 1e6)
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        numbers = [value.number for value in field.enum_type.values]
        return random.choice((*numbers, *numbers, -1, 99, 1 << 30))
    if kind == FieldDescriptor.CPPTYPE_STRING:
        if field.type == FieldDescriptor.TYPE_BYTES:
            return _blob(random, now)
        return random.choice(_TEXTS) if random.random() < 0.3 else random.choice(words)
    if now is not None and random.random() < 0.3:
        number = now + random.choice((-1, 1, -2, 2, 7, -8))
    else:
        number = random.choice(_INTEGERS if random.random() < 0.8 else _HUGE)
        if random.random() < 0.1:
            number = -number
    if kind in _UNSIGNED:
        return number % (1 << _UNSIGNED[kind])
    half = 1 << _SIGNED[kind]
    return (number + half) % (2 * half) - half


def _blob(random: Random, now: bytes | None) -> bytes:
    if now and random.random() < 0.4:
        # Of the same length, so that it still fits its declared shape.
        made = bytearray(now)
        made[random.randrange(len(made))] = random.choice((0, 1, 4, 127, 128, 255, random.randrange(256)))
        return bytes(made)
    if now and random.random() < 0.5:
        return with_bytes_changed(random, now)
    return (
        random.choice(_BLOBS)
        if random.random() < 0.5
        else random.randbytes(random.choice((1, 4, 8, 12, 24, 48)))
    )
