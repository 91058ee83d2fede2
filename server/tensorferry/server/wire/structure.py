"""Check of a message against the bounds before it is parsed.

Protobuf parses a message whole while it holds the GIL: 60 MB of empty entries take seconds and gigabytes. The check
stops at the first bound exceeded, so a message costs at most what the bounds allow.
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
from tensorferry.server.observability.logs.logs import quote
from tensorferry.server.wire import bounds
from tensorferry.server.wire.bounds import FIELD_BOUNDS, FieldBound
from tensorferry.server.wire.fields import DELIMITED, MAX_VARINT_BYTES, MalformedError, fields

# Typed contents with fewer elements in a message are not counted, because parsing them costs little.
_UNCHECKED_ELEMENTS = 16 * 1024

# The id is looked for in these fields only: protobuf writes it before the tensors.
_ID = pb.ModelInferRequest.DESCRIPTOR.fields_by_name["id"].number
_FIRST_FIELDS = 16

_CONTENTS = pb.InferTensorContents.DESCRIPTOR
_STRINGS = _CONTENTS.fields_by_name["bytes_contents"].number
_FIXED_WIDTH = {_CONTENTS.fields_by_name[name].number for name in ("fp32_contents", "fp64_contents")}


class _Rule(NamedTuple):
    """Bounds of a field. `inside` has the rules of a message; typed contents have their own."""

    name: str
    bound: FieldBound
    is_list: bool = False
    inside: Mapping[int, _Rule] | None = None
    is_contents: bool = False


@cache
def _rules_of(message: Any) -> Mapping[int, _Rule]:
    """Return the rules by field number. KeyError for a text or bytes field that the table of bounds lacks."""
    field_bounds = FIELD_BOUNDS.get(message.full_name, {})
    rules = {}
    for field in message.fields:
        inside = field.message_type
        is_number = inside is None and field.cpp_type != FieldDescriptor.CPPTYPE_STRING
        if is_number and field.name not in field_bounds:
            continue
        is_contents = inside is _CONTENTS
        rules[field.number] = _Rule(
            field.name,
            field_bounds[field.name] if inside is None else field_bounds.get(field.name, FieldBound()),
            is_number,
            None if inside is None or is_contents else _rules_of(inside),
            is_contents,
        )
    return rules


def check_message(data: bytes, kind: type[Message]) -> None:
    """Raise InvalidRequestError for a serialised message of this type that exceeds a bound."""
    try:
        _MessageCheck(data).check(0, len(data), _rules_of(kind.DESCRIPTOR), "")
    except MalformedError:
        raise InvalidRequestError(
            f"the message of {len(data)} bytes is not a {kind.DESCRIPTOR.name}"
        ) from None


def peek_request_id(data: bytes) -> str:
    """Return the id of a ModelInferRequest that was not parsed; "" if it is not among the first fields."""
    try:
        for number, kind, begin, end in islice(fields(data, 0, len(data)), _FIRST_FIELDS):
            if (number, kind) == (_ID, DELIMITED) and end - begin <= bounds.REQUEST_ID_BYTES:
                return bytes(data[begin:end]).decode()
    except (MalformedError, UnicodeDecodeError):
        pass
    return ""


class _MessageCheck:
    """The check of one message. The attributes `_..._left` count down what the rest may hold."""

    __slots__ = (
        "_data",
        "_fields_left",
        "_integers_left",
        "_strings_left",
        "_unchecked_left",
    )

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._fields_left = bounds.MAX_FIELDS
        self._integers_left = bounds.MAX_INTEGERS
        self._strings_left = bounds.MAX_STRINGS
        self._unchecked_left = _UNCHECKED_ELEMENTS

    def check(self, start: int, stop: int, rules: Mapping[int, _Rule], path: str) -> None:
        """Check the message between two positions. `path` names it in errors and ends with a dot."""
        counts: dict[int, int] = {}
        for number, kind, begin, end in fields(self._data, start, stop):
            self._fields_left -= 1
            if self._fields_left < 0:
                raise InvalidRequestError(
                    f"the message has more than {bounds.MAX_FIELDS} fields, those within its fields included, which is the "
                    "most this server takes: send numbers packed or in raw_input_contents, and what the model takes"
                )
            rule = rules.get(number)
            if rule is None:
                continue
            max_entries, max_bytes = rule.bound
            if max_entries > 1:
                entries = 1
                if rule.is_list and kind == DELIMITED:
                    entries = self._count_packed(begin, end, max_entries)
                counts[number] = count = counts.get(number, 0) + entries
                if count > max_entries:
                    raise InvalidRequestError(
                        f"the message has more than {max_entries} entries in {path}{rule.name}, which is the most this server takes: "
                        "send what the model takes"
                    )
            if kind != DELIMITED:
                continue
            if end - begin > max_bytes:
                text = bytes(self._data[begin : begin + 128]).decode(errors="replace")
                raise InvalidRequestError(
                    f"{path}{rule.name} has {end - begin} bytes; this server takes at most {max_bytes}: send a shorter one "
                    f"than {quote(text + '...')}"
                )
            if rule.inside is not None:
                self.check(begin, end, rule.inside, f"{path}{rule.name}.")
            elif rule.is_contents:
                self._check_contents(begin, end, path)

    def _count_packed(self, start: int, stop: int, max_entries: int) -> int:
        """Count packed varints. Return more than `max_entries`, uncounted, if the bytes can only be too many."""
        if stop - start > max_entries * MAX_VARINT_BYTES:
            return max_entries + 1
        return sum(byte < 128 for byte in self._data[start:stop])

    def _check_contents(self, start: int, stop: int, path: str) -> None:
        """Count the elements of typed contents, unless the message is too small to hold many."""
        self._unchecked_left -= (stop - start) // 2 + 1
        if self._unchecked_left >= 0:
            return
        for number, kind, begin, end in fields(self._data, start, stop):
            if number == _STRINGS:
                self._strings_left -= 1
                if self._strings_left < 0:
                    raise InvalidRequestError(
                        f"{path}contents has more than {bounds.MAX_STRINGS} strings, which is the most this server takes in a "
                        "request: send less at once"
                    )
                continue
            self._fields_left -= 1
            if kind == DELIMITED and number not in _FIXED_WIDTH:
                packed = np.frombuffer(self._data, np.uint8, end - begin, begin)
                self._integers_left -= int(np.count_nonzero(packed < 128))
            if self._fields_left < 0 or self._integers_left < 0:
                raise InvalidRequestError(
                    f"{path}contents has more than {bounds.MAX_INTEGERS} packed integers, or {bounds.MAX_FIELDS} lists of "
                    "packed numbers and numbers that are not packed, which is the most this server takes: send them in "
                    "raw_input_contents"
                )
