"""The check of messages before they are parsed: the table of bounds, and the number of steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fuzz.attackers.bombs import Bomb, bombs, field
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import given
from hypothesis import strategies as st
from server.wire.kinds import BY_METHOD, KINDS
from support.server.rig import fp32, reproducible, request

from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.errors import InvalidRequestError
from tensorferry.server.wire import bounds, structure
from tensorferry.server.wire.fields import (
    DELIMITED,
    VARINT,
    Field,
    MalformedError,
    encode_varint,
    fields,
    varint,
)

# Above the bound on fields; the bound on integers is larger.
BOMBS = [
    bomb
    for size, is_integers in ((200_000, False), (3 << 20, True))
    for bomb in bombs(size)
    if (bomb.name == "packed int64_contents") is is_integers
]


def _is_repeated(field: Any) -> bool:
    """Whether a field repeats. Protobuf before 6.31 has only the label, and newer versions warn about it."""
    if hasattr(field, "is_repeated"):
        return bool(field.is_repeated)
    return bool(field.label == field.LABEL_REPEATED)


def messages_in(message: Any, seen: set[str]) -> Iterator[Any]:
    """Yield the descriptors of a message and of the messages in it."""
    if message.full_name in seen:
        return
    seen.add(message.full_name)
    yield message
    for each in message.fields:
        if each.message_type is not None:
            yield from messages_in(each.message_type, seen)


def test_the_table_bounds_every_text_and_every_list() -> None:
    seen: set[str] = set()
    for kind in KINDS.values():
        for message in messages_in(kind.DESCRIPTOR, seen):
            if message.full_name == "inference.InferTensorContents":
                # Counted by the check itself.
                continue
            bounded = bounds.FIELD_BOUNDS.get(message.full_name, {})
            expected = {
                each.name
                for each in message.fields
                if each.cpp_type == FieldDescriptor.CPPTYPE_STRING or _is_repeated(each)
            }
            assert set(bounded) == expected, message.full_name
    assert set(bounds.FIELD_BOUNDS) <= seen


@pytest.mark.parametrize("bomb", BOMBS, ids=lambda bomb: f"{bomb.method}, {bomb.name}")
def test_a_bomb_is_refused_within_a_bounded_number_of_steps(
    bomb: Bomb, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = 0

    def counted(*arguments: Any) -> Iterator[Field]:
        nonlocal steps
        for each in fields(*arguments):
            steps += 1
            yield each

    monkeypatch.setattr(structure, "fields", counted)
    with pytest.raises(InvalidRequestError) as caught:
        structure.check_message(bomb.data, BY_METHOD[bomb.method])
    assert steps <= bounds.MAX_FIELDS + bounds.MAX_STRINGS + 1
    assert len(str(caught.value)) < 400


def test_a_message_at_its_bounds_is_accepted() -> None:
    message = request({"x": fp32(1, 3)}, id="i" * bounds.REQUEST_ID_BYTES)
    tensor = message.inputs[0]
    tensor.name = "n" * bounds.TENSOR_NAME_BYTES
    del tensor.shape[:]
    tensor.shape.extend([1 << 62] * bounds.MAX_DIMENSIONS)
    for number in range(bounds.MAX_PARAMETERS):
        message.parameters[f"{number}"].bool_param = True
        tensor.parameters[f"{number}"].string_param = "v"
    for number in range(bounds.MAX_TENSORS - 1):
        message.inputs.add(name=f"{number}", datatype="FP32", shape=[1])
    structure.check_message(message.SerializeToString(), pb.ModelInferRequest)
    strings = request({"s": np.array([b"text"] * bounds.MAX_STRINGS, dtype=object)}, typed=True)
    structure.check_message(strings.SerializeToString(), pb.ModelInferRequest)
    numbers = request({"n": np.full(bounds.MAX_INTEGERS, -1, np.int64)}, typed=True)
    structure.check_message(numbers.SerializeToString(), pb.ModelInferRequest)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (pb.ModelInferRequest(model_name="m" * 129), "model_name has 129 bytes; this server takes at most 128"),
        (pb.ModelInferRequest(id="é" * 2049), "id has 4098 bytes; this server takes at most 4096"),
        (
            pb.ModelInferRequest(inputs=[pb.ModelInferRequest.InferInputTensor(datatype="D" * 65)]),
            "inputs.datatype has 65 bytes; this server takes at most 64",
        ),
        (pb.ModelInferRequest(inputs=[pb.ModelInferRequest.InferInputTensor(shape=[300] * 65)]), "more than 64 entries in inputs.shape"),
        (pb.ModelInferRequest(raw_input_contents=[b""] * 4097), "more than 4096 entries in raw_input_contents"),
        (
            pb.TraceSettingRequest(settings={"s": pb.TraceSettingRequest.SettingValue(value=["v"] * 65)}),
            "more than 64 entries in settings.value.value",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else type(value).__name__,
)  # fmt: skip
def test_a_message_above_a_bound_is_refused_with_bound_and_field(message: Any, text: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        structure.check_message(message.SerializeToString(), type(message))
    assert text in str(caught.value)


def test_contents_of_many_inputs_count_together() -> None:
    one = field(5, field(5, field(8, b"") * 1024))
    structure.check_message(one * 64, pb.ModelInferRequest)
    with pytest.raises(InvalidRequestError, match="more than 65536 strings"):
        structure.check_message(one * 81, pb.ModelInferRequest)


@reproducible
@given(st.binary(max_size=64))
def test_fields_of_any_bytes_end_at_their_end_or_are_refused(data: bytes) -> None:
    """Everything that protobuf parses has fields to its end, except groups. The reverse does not hold."""
    try:
        found = list(fields(data, 0, len(data)))
    except MalformedError:
        return
    stops = [stop for _, _, _, stop in found]
    assert stops == sorted(stops)
    assert stops[-1:] in ([], [len(data)])


@reproducible
@given(st.lists(st.tuples(st.integers(1, 1 << 20), st.integers(0, (1 << 64) - 1) | st.binary(max_size=200))))
def test_fields_are_found_as_written(written: list[tuple[int, int | bytes]]) -> None:
    data = b""
    for number, value in written:
        if isinstance(value, bytes):
            data += field(number, value)
        else:
            data += encode_varint(number << 3 | VARINT) + encode_varint(value)
    found: list[tuple[int, int | bytes]] = []
    for number, kind, start, stop in fields(data, 0, len(data)):
        found.append((number, data[start:stop] if kind == DELIMITED else varint(data, start)[0]))
    assert found == written


@pytest.mark.parametrize(
    "data", [b"\x0a", b"\x0a\x05abc", b"\x0d\x01", b"\x08" + b"\x80" * 11, b"\x0b", b"\x80"]
)
def test_a_truncated_message_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedError):
        list(fields(data, 0, len(data)))


def test_the_id_of_a_refused_message_is_found() -> None:
    """A stream's client needs it to tell which of its requests failed."""
    request = pb.ModelInferRequest(model_name="m" * 200, id="seven")
    with pytest.raises(InvalidRequestError):
        structure.check_message(request.SerializeToString(), pb.ModelInferRequest)
    assert structure.peek_request_id(request.SerializeToString()) == "seven"
    assert structure.peek_request_id(request.SerializeToString() + b"\xff") == "seven"
    assert structure.peek_request_id(pb.ModelInferRequest(id="i" * 5000).SerializeToString()) == ""
    # An id that is not UTF-8.
    assert structure.peek_request_id(b"\x1a\x01\xff") == ""
    many = pb.ModelInferRequest(inputs=[pb.ModelInferRequest.InferInputTensor()] * 100).SerializeToString()
    late = pb.ModelInferRequest(id="late").SerializeToString()
    assert structure.peek_request_id(many + late) == ""
