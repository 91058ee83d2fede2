"""A matched request reads exactly as protobuf and `decode_request` would read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.server.rig import fp32, reproducible, request, signature, spec

from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.inference.requests import request_templates
from tensorferry.server.inference.requests.codec import decode_request
from tensorferry.server.inference.requests.request_templates import RequestTemplate, RequestTemplateCache
from tensorferry.server.inference.shared_memory.regions import RegionLease, Regions
from tensorferry.server.models.lifecycle.model import Model
from tensorferry.server.wire.fields import encode_varint
from tensorferry.server.wire.receiving import parse

PRIORITIES = 2


def model(name: str = "m", *inputs: Any) -> Model:
    specs = inputs or (
        spec("x", "FP32", "batch", "n"),
        spec("k", "INT64", "batch"),
        spec("h", "FP16", "batch", 2),
    )
    made = signature(*specs, outputs=(spec("y", "FP32", "batch"), spec("z", "INT64", "batch")))
    batcher = SimpleNamespace(priorities=PRIORITIES, policies=())
    return Model(name, "1", made, 8, "", cast(Any, batcher))


MODEL = model()


@dataclass
class Part:
    """A field of a message. A template matches messages with another `value` of kind "raw" or "id"."""

    kind: str
    head: bytes
    value: bytes

    def with_value(self, value: bytes) -> Part:
        return Part(self.kind, self.head, value)


def joined(parts: Sequence[Part]) -> bytes:
    return b"".join(part.head + part.value for part in parts)


def field(number: int, value: bytes, *, padded: bool = False) -> bytes:
    """The tag and the length of a field. `padded`: with longer varints, which libraries read but never write."""
    tag, length = encode_varint(number << 3 | 2), encode_varint(len(value))
    if not padded:
        return tag + length
    return tag[:-1] + bytes([tag[-1] | 128, 0]) + length[:-1] + bytes([length[-1] | 128, 0])


def numbers(*sizes: int) -> st.SearchStrategy[bytes]:
    """Bytes, some of which look like fields of a message."""
    size = int(np.prod(sizes))
    alike = pb.ModelInferRequest(model_name="other", id="not an id", raw_input_contents=[b"raw"])
    looks = (alike.SerializeToString() * (1 + size // 10))[:size]
    return st.one_of(st.binary(min_size=size, max_size=size), st.just(looks))


@st.composite
def messages(draw: Any) -> list[Part]:
    """The fields of a message, in any order that protobuf allows, some of them unknown."""
    rows, columns = draw(st.integers(0, 3)), draw(st.integers(0, 2))
    padded = st.booleans() if draw(st.integers(0, 3)) == 0 else st.just(False)
    shapes = {"x": (rows, columns), "k": (rows,), "h": (rows, 2)}
    kinds = {"x": ("FP32", 4), "k": ("INT64", 8), "h": ("FP16", 2)}
    tensors: list[Part] = []
    raws: list[Part] = []
    for name in draw(st.permutations(list(shapes))):
        tensor = pb.ModelInferRequest.InferInputTensor(
            name=name, datatype=kinds[name][0], shape=shapes[name]
        ).SerializeToString()
        tensors.append(Part("fixed", field(5, tensor, padded=draw(padded)), tensor))
        raw = draw(numbers(*shapes[name], kinds[name][1]))
        raws.append(Part("raw", field(7, raw, padded=draw(padded)), raw))
    others = [Part("fixed", field(1, b"m"), b"m")]
    if draw(st.booleans()):
        text = draw(st.text(max_size=draw(st.sampled_from([3, 200])))).encode()
        others.append(Part("id", field(3, text, padded=draw(padded)), text))
    rest = pb.ModelInferRequest()
    if draw(st.booleans()):
        rest.model_version = "1"
    if draw(st.booleans()):
        rest.parameters["priority"].int64_param = draw(st.integers(0, 3))
    if draw(st.booleans()):
        rest.parameters["explain"].bool_param = draw(st.booleans())
    if draw(st.booleans()):
        rest.parameters["timeout"].int64_param = draw(st.integers(0, 10**9))
    for name in draw(st.permutations(["y", "z"]))[: draw(st.integers(0, 2))]:
        rest.outputs.add(name=name)
    others.append(Part("fixed", b"", rest.SerializeToString()))
    for _ in range(draw(st.integers(0, 2))):
        unknown = draw(st.binary(max_size=5))
        others.append(Part("fixed", field(draw(st.integers(9, 5000)), unknown), unknown))
    if draw(st.integers(0, 9)) == 0:
        others.append(Part("fixed", field(3, b"2nd"), b"2nd"))
    # Inputs and raw contents keep their order; the other fields stand anywhere.
    kinds_in_order = draw(
        st.permutations(["tensor"] * len(tensors) + ["raw"] * len(raws) + ["other"] * len(others))
    )
    waiting = {"tensor": tensors, "raw": raws, "other": others}
    return [waiting[kind].pop(0) for kind in kinds_in_order]


@st.composite
def pairs(draw: Any) -> tuple[bytes, bytes, bool]:
    """Two messages, and whether they differ in values and id only."""
    parts = draw(messages())
    other = []
    for part in parts:
        if part.kind == "raw":
            other.append(part.with_value(draw(numbers(len(part.value)))))
        elif part.kind == "id" and draw(st.booleans()):
            size = len(part.value)
            value = draw(st.one_of(st.binary(min_size=size, max_size=size), st.just(b"i" * size)))
            other.append(part.with_value(value))
        else:
            other.append(part)
    data = bytearray(joined(other))
    same = draw(st.booleans())
    if not same:
        change = draw(st.integers(0, 3))
        at = draw(st.integers(0, len(data) - 1))
        if change == 0:
            data[at] = draw(st.integers(0, 255))
        elif change == 1:
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif change == 2:
            size = draw(st.integers(1, 8))
            to = draw(st.integers(0, len(data) - 1))
            data[at : at + size], data[to : to + size] = data[to : to + size], data[at : at + size]
        else:
            data = bytearray(joined(draw(messages())))
    return joined(parts), bytes(data), same


def add(cache: RequestTemplateCache, data: bytes, generation: int = 0, of: Model = MODEL) -> RequestTemplate:
    """Decode a message and add its template, as the service does."""
    message = parse(data, pb.ModelInferRequest)
    assert (message.model_name, message.model_version) in ((of.name, ""), (of.name, "1"))
    decoded = decode_request(message, of.name, of.signature, of.batched, RegionLease(Regions()))
    return cache.add(data, message, of, decoded, generation)


def contents_of(template: RequestTemplate) -> tuple[Any, ...]:
    """Everything in a template, in a form that compares."""
    response = template.response
    return (
        template.model,
        template.names,
        template.rows,
        template.nbytes,
        template.key,
        template.priority,
        template.timeout,
        template.padding,
        (response._model, response._version, response.spec),
    )


def check(cache: RequestTemplateCache, data: bytes) -> bool:
    """Whether the message matches a template. If so, the match must equal the decoded request."""
    found = cache.find(data, 0)
    if found is None:
        return False
    template, request_id, id_field, tensors, _ = found
    message = parse(data, pb.ModelInferRequest)
    decoded = decode_request(message, "m", MODEL.signature, MODEL.batched, RegionLease(Regions()))
    assert contents_of(template) == contents_of(add(RequestTemplateCache(), data))
    assert request_id == message.id
    # The id has the same field number in requests and responses.
    assert pb.ModelInferResponse.FromString(id_field) == pb.ModelInferResponse(id=message.id)
    assert [(t.dtype, t.shape, bytes(t.data)) for t in tensors] == [
        (t.dtype, t.shape, bytes(t.data)) for t in decoded.tensors
    ]
    return True


@given(pairs())
@settings(reproducible, max_examples=200, suppress_health_check=[HealthCheck.too_slow])
def test_a_match_equals_the_decoded_request(pair: tuple[bytes, bytes, bool]) -> None:
    known, data, same = pair
    cache = RequestTemplateCache()
    add(cache, known)
    assert check(cache, known) or _has_two_ids(known)
    found = check(cache, data)
    if same and not found and not _has_two_ids(known):
        with pytest.raises(Exception, match="is not a ModelInferRequest"):  # its id is no UTF-8
            parse(data, pb.ModelInferRequest)


def _has_two_ids(data: bytes) -> bool:
    """Whether the message has two ids and so becomes no template."""
    return data.count(b"2nd") > 0


def cache_with(data: bytes, of: Model = MODEL) -> RequestTemplateCache:
    cache = RequestTemplateCache()
    add(cache, data, of=of)
    return cache


def plain(request_id: str = "", value: float = 0.0, **fields: Any) -> bytes:
    """A message as libraries write it."""
    arrays = {"x": fp32(2, 3) + np.float32(value), "k": np.array([1, 2]), "h": np.zeros((2, 2), np.float16)}
    return request(arrays, id=request_id, **fields).SerializeToString()


def test_every_truncation_and_every_changed_bit_of_a_message() -> None:
    data = plain("an id", parameters={"priority": pb.InferParameter(int64_param=1)})
    cache = cache_with(data)
    for at in range(len(data)):
        assert cache.find(data[:at], 0) is None
        for bit in range(8):
            check(cache, data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])


def test_values_of_large_messages_are_views_and_those_of_small_ones_copies() -> None:
    def tensors_of(columns: int) -> tuple[bytes, Any]:
        one = model("m", spec("x", "FP32", "batch", "n"))
        data = request({"x": fp32(1, columns)}).SerializeToString()
        found = cache_with(data, one).find(data, 0)
        assert found is not None
        return data, found[3][0].data

    small, values = tensors_of(4)
    assert (type(values), values in small) == (bytes, True)
    large, values = tensors_of(10_000)
    assert isinstance(values, memoryview)
    assert values.obj is large


WORD = np.array(["a"], dtype=object)


@pytest.mark.parametrize(
    "data",
    [
        request({"s": WORD}).SerializeToString(),
        request({"b": WORD}).SerializeToString(),
        request({"x": fp32(1, 2)}, typed=True).SerializeToString(),
        request({"x": fp32(1, 2)}).SerializeToString() + field(3, b"one") + b"one" + field(3, b"two") + b"two",
        b"\x50\x00" + request({"x": fp32(1, 2)}).SerializeToString(),
        request({"x": fp32(1, 2)}).SerializeToString() + (field(100, b"") * 130),
        request({"x": fp32(1, 2)}).SerializeToString() + field(100, b"y" * 9000) + b"y" * 9000,
    ],
    ids=["text", "binary", "typed", "two ids", "a number", "many fields", "many fixed bytes"],
)  # fmt: skip
def test_unusual_messages_become_no_template(data: bytes) -> None:
    (tensor,) = pb.ModelInferRequest.FromString(data).inputs
    dims = ["n"] * (len(tensor.shape) - 1)
    one = model("m", spec(tensor.name, tensor.datatype, "batch", *dims, binary=tensor.name == "b"))
    cache = cache_with(data, one)
    assert cache.find(data, 0) is None
    assert contents_of(add(cache, data, of=one)) == contents_of(add(RequestTemplateCache(), data, of=one))


@pytest.mark.parametrize(
    ("verdict", "length", "alone"), [("proved", 3, True), ("proved", 2, False), ("tested", 3, False)]
)
def test_lengths_that_a_proof_holds_for_equal_run_alone_if_they_differ(
    verdict: str, length: int, alone: bool
) -> None:
    two = replace(
        model("m", spec("x", "FP32", "batch", "n"), spec("z", "FP32", "batch", "n")), batching_verdict=verdict
    )
    data = request({"x": fp32(1, 2), "z": fp32(1, length)}).SerializeToString()
    keys = [add(RequestTemplateCache(), data, of=two).key for _ in range(2)]
    assert (keys[0] != keys[1]) is alone
    assert (cache_with(data, two).find(data, 0) is None) is alone


def test_templates_are_bounded() -> None:
    cache = RequestTemplateCache()
    for size in range(600):
        add(cache, plain("i" * size))
        assert len(cache._by_size) <= request_templates._MAX_SIZES
    for number in range(100):
        timeout = pb.InferParameter(int64_param=1000 + number)
        add(cache, plain(parameters={"timeout": timeout}))
        assert all(
            len(known) <= request_templates._MAX_ENTRIES_OF_A_SIZE for known in cache._by_size.values()
        )
    # Of one size only the last few are kept. An older one is kept again when it comes again.
    old = plain(parameters={"timeout": pb.InferParameter(int64_param=1001)})
    assert cache.find(old, 0) is None
    add(cache, old)
    assert check(cache, old)


def test_templates_of_another_generation_are_dropped() -> None:
    cache = RequestTemplateCache()
    data = plain()
    first = add(cache, data, 1)
    assert cache.find(data, 0) is None
    assert cache.find(data, 2) is None
    other = model()
    second = add(cache, data, 2, of=other)
    assert cache.find(data, 1) is None
    found = cache.find(data, 2)
    assert found is not None
    assert (first.model, found[0].model) == (MODEL, other)
    assert found[0] is second
    assert second.response is not first.response


def test_a_template_of_an_old_generation_is_not_kept() -> None:
    """It neither restores old models nor replaces new templates."""
    cache = RequestTemplateCache()
    other = model()
    add(cache, plain(), 2, of=other)
    old = add(cache, plain("an id"), 1)
    assert old.model is MODEL
    assert cache.find(plain("an id"), 1) is None
    assert cache.find(plain("an id"), 2) is None
    assert cache.find(plain(), 2) is not None
    assert add(cache, plain(), 2, of=other).response is not old.response
