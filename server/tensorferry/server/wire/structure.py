"""The structure of a message, checked before it is parsed.

Protobuf parses a message whole, with the interpreter's lock held: 60 MB of empty entries take it seconds and gigabytes.
The walk here ends at the first bound that is exceeded, so a message costs no more than what it may hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.errors import InvalidRequestError
from tensorferry.server.telemetry.logs import quote
from tensorferry.server.wire import bounds
from tensorferry.server.wire.bounds import FIELD_BOUNDS, FieldBound
from tensorferry.server.wire.fields import DELIMITED, Data, MalformedError, fields

# Contents with at most this number of elements in a message are not checked, because they cost little.
_FEW_ELEMENTS = 16 * 1024
_LONGEST_DIMENSION = 10

# Protobuf writes a request's id before its tensors.
_ID = pb.ModelInferRequest.DESCRIPTOR.fields_by_name["id"].number
_FIRST_FIELDS = 16

_CONTENTS = pb.InferTensorContents.DESCRIPTOR
_STRINGS = _CONTENTS.fields_by_name["bytes_contents"].number
_FIXED_WIDTH = {_CONTENTS.fields_by_name[name].number for name in ("fp32_contents", "fp64_contents")}


class _Rule(NamedTuple):
    """What a field may be: a text, a list of numbers, typed contents, or a message with the rules `inside`."""

    name: str
    bound: FieldBound
    is_list: bool = False
    inside: Mapping[int, _Rule] | None = None
    is_contents: bool = False


@cache
def _rules_of(message: Any) -> Mapping[int, _Rule]:
    """By the numbers of fields. KeyError for a text or bytes that the table of bounds lacks."""
    known = FIELD_BOUNDS.get(message.full_name, {})
    rules = {}
    for field in message.fields:
        inside = field.message_type
        is_number = inside is None and field.cpp_type != FieldDescriptor.CPPTYPE_STRING
        if is_number and field.name not in known:
            continue
        is_contents = inside is _CONTENTS
        rules[field.number] = _Rule(
            field.name,
            known[field.name] if inside is None else known.get(field.name, FieldBound()),
            is_number,
            None if inside is None or is_contents else _rules_of(inside),
            is_contents,
        )
    return rules


def check_message(data: Data, kind: type[Message], *, most_strings: int = bounds.ANY_LENGTH) -> None:
    """InvalidRequestError for a serialised message of this kind with more, or longer, entries than it may have.

    `most_strings` bounds the strings in typed contents.
    """
    try:
        _Walk(data, most_strings).message(0, len(data), _rules_of(kind.DESCRIPTOR), "")
    except MalformedError:
        raise InvalidRequestError(
            f"the message of {len(data)} bytes is not a {kind.DESCRIPTOR.name}"
        ) from None


def peek_request_id(data: Data) -> str:
    """The id of a ModelInferRequest that `check_message` refuses; empty where it is not among the first fields, or is no id."""
    try:
        for number, kind, begin, end in islice(fields(data, 0, len(data)), _FIRST_FIELDS):
            if (number, kind) == (_ID, DELIMITED) and end - begin <= bounds.REQUEST_ID_BYTES:
                return bytes(data[begin:end]).decode()
    except (MalformedError, UnicodeDecodeError):
        pass
    return ""


class _Walk:
    """One walk over one message, and how much more it may find."""

    __slots__ = ("_data", "_few", "_fields", "_integers", "_most_strings", "_strings")

    def __init__(self, data: Data, most_strings: int) -> None:
        self._data = data
        self._fields = bounds.MAX_FIELDS
        self._integers = bounds.MAX_INTEGERS
        self._most_strings = self._strings = most_strings
        self._few = _FEW_ELEMENTS

    def message(self, start: int, stop: int, rules: Mapping[int, _Rule], path: str) -> None:
        """Holds the message between two places against its rules. `path` is where it is, with a dot at its end."""
        counts: dict[int, int] = {}
        for number, kind, begin, end in fields(self._data, start, stop):
            self._fields -= 1
            if self._fields < 0:
                raise InvalidRequestError(
                    f"the message has more than {bounds.MAX_FIELDS} fields, those within its fields included, which is the "
                    "most this server takes: send numbers packed or in raw_input_contents, and what the model takes"
                )
            rule = rules.get(number)
            if rule is None:
                continue
            most, longest = rule.bound
            if most > 1:
                entries = 1
                if rule.is_list and kind == DELIMITED:
                    entries = self._packed(begin, end, most)
                counts[number] = count = counts.get(number, 0) + entries
                if count > most:
                    raise InvalidRequestError(
                        f"the message has more than {most} entries in {path}{rule.name}, which is the most this server takes: "
                        "send what the model takes"
                    )
            if kind != DELIMITED:
                continue
            if end - begin > longest:
                text = bytes(self._data[begin : begin + 128]).decode(errors="replace")
                raise InvalidRequestError(
                    f"{path}{rule.name} has {end - begin} bytes; this server takes at most {longest}: send a shorter one "
                    f"than {quote(text + '...')}"
                )
            if rule.inside is not None:
                self.message(begin, end, rule.inside, f"{path}{rule.name}.")
            elif rule.is_contents:
                self._contents(begin, end, path)

    def _packed(self, start: int, stop: int, most: int) -> int:
        """How many numbers of variable length are packed here; at least more than `most` where it takes long to tell."""
        if stop - start > most * _LONGEST_DIMENSION:
            return most + 1
        return sum(byte < 128 for byte in self._data[start:stop])

    def _contents(self, start: int, stop: int, path: str) -> None:
        """Counts the elements of typed contents, unless those of the whole message can only be few."""
        self._few -= (stop - start) // 2 + 1
        if self._few >= 0:
            return
        for number, kind, begin, end in fields(self._data, start, stop):
            if number == _STRINGS:
                self._strings -= 1
                if self._strings < 0:
                    raise InvalidRequestError(
                        f"{path}contents has more than {self._most_strings} strings, which is the most this server takes in a "
                        "request: send less at once, or start it with a larger --max-strings"
                    )
            elif kind != DELIMITED:
                self._fields -= 1
            elif number not in _FIXED_WIDTH:
                packed = np.frombuffer(self._data, np.uint8, end - begin, begin)
                self._integers -= int(np.count_nonzero(packed < 128))
            if self._fields < 0 or self._integers < 0:
                raise InvalidRequestError(
                    f"{path}contents has more than {bounds.MAX_INTEGERS} packed integers, or {bounds.MAX_FIELDS} numbers that "
                    "are not packed, which is the most this server takes: send them in raw_input_contents"
                )
