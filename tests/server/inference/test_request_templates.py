"""What is remembered of a request never reads another one otherwise than protobuf and `decode_request` would."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.server.rig import PATIENCE, fp32, reproducible, request, signature, spec

from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.inference import request_templates
from tensorferry.server.inference.codec import decode_request
from tensorferry.server.inference.request_templates import RequestTemplate, RequestTemplateCache
from tensorferry.server.models.registry import Model
from tensorferry.server.shared_memory.regions import RegionLease, Regions
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
    """A field of a message: `value` may change from request to request, or is part of the form."""

    kind: str
    head: bytes
    value: bytes

    def with_value(self, value: bytes) -> Part:
        return Part(self.kind, self.head, value)


def joined(parts: Sequence[Part]) -> bytes:
    return b"".join(part.head + part.value for part in parts)


def field(number: int, value: bytes, *, padded: bool = False) -> bytes:
    """The tag and the length of a field; `padded` as no library writes them, though all can read them."""
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
    """The fields of a message, in any order that protobuf allows, perhaps with some that nobody knows."""
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
    said = pb.ModelInferRequest()
    if draw(st.booleans()):
        said.model_version = "1"
    if draw(st.booleans()):
        said.parameters["priority"].int64_param = draw(st.integers(0, 3))
    if draw(st.booleans()):
        said.parameters["explain"].bool_param = draw(st.booleans())
    if draw(st.booleans()):
        said.parameters["timeout"].int64_param = draw(st.integers(0, 10**9))
    for name in draw(st.permutations(["y", "z"]))[: draw(st.integers(0, 2))]:
        said.outputs.add(name=name)
    others.append(Part("fixed", b"", said.SerializeToString()))
    for _ in range(draw(st.integers(0, 2))):
        unknown = draw(st.binary(max_size=5))
        others.append(Part("fixed", field(draw(st.integers(9, 5000)), unknown), unknown))
    if draw(st.integers(0, 9)) == 0:
        others.append(Part("fixed", field(3, b"2nd"), b"2nd"))
    # Inputs and raw contents each in their order, everything else anywhere between.
    places = draw(st.permutations(["tensor"] * len(tensors) + ["raw"] * len(raws) + ["other"] * len(others)))
    waiting = {"tensor": tensors, "raw": raws, "other": others}
    return [waiting[write_outputs].pop(0) for write_outputs in places]


@st.composite
def pairs(draw: Any) -> tuple[bytes, bytes, bool]:
    """Two messages that differ in what may differ; or in something else, too (then false)."""
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


def remember(
    cache: RequestTemplateCache, data: bytes, generation: int = 0, of: Model = MODEL
) -> RequestTemplate:
    """As the service does with a message of a form that is not known. Raises for what is none."""
    message = parse(data, pb.ModelInferRequest)
    assert (message.model_name, message.model_version) in ((of.name, ""), (of.name, "1"))
    decoded = decode_request(message, of.name, of.signature, of.batched, RegionLease(Regions()))
    return cache.add(data, message, of, decoded, generation)


def told(form: RequestTemplate) -> tuple[Any, ...]:
    """Everything that a form says."""
    response = form.response
    return (
        form.model,
        form.names,
        form.rows,
        form.nbytes,
        form.key,
        form.priority,
        form.timeout,
        form.padding,
        (response._model, response._version, response._response_spec),
    )


def check(cache: RequestTemplateCache, data: bytes) -> bool:
    """Whether the message was found; what was found must be what is read the long way."""
    found = cache.find(data, 0)
    if found is None:
        return False
    form, request_id, id_field, tensors = found
    message = parse(data, pb.ModelInferRequest)
    decoded = decode_request(message, "m", MODEL.signature, MODEL.batched, RegionLease(Regions()))
    assert told(form) == told(remember(RequestTemplateCache(), data))
    assert request_id == message.id
    # Its place in a response is the same as in a request.
    assert pb.ModelInferResponse.FromString(id_field) == pb.ModelInferResponse(id=message.id)
    assert [(t.dtype, t.shape, bytes(t.data)) for t in tensors] == [
        (t.dtype, t.shape, bytes(t.data)) for t in decoded.tensors
    ]
    return True


@given(pairs())
@settings(reproducible, max_examples=600, suppress_health_check=[HealthCheck.too_slow])
def test_what_is_found_is_what_would_be_read(pair: tuple[bytes, bytes, bool]) -> None:
    known, data, same = pair
    cache = RequestTemplateCache()
    remember(cache, known)
    assert check(cache, known) or _twice(known)
    found = check(cache, data)
    if same and not found and not _twice(known):
        with pytest.raises(Exception, match="is not a ModelInferRequest"):  # its id is no UTF-8
            parse(data, pb.ModelInferRequest)


def _twice(data: bytes) -> bool:
    """Whether it has two ids, and is not remembered."""
    return data.count(b"2nd") > 0


def cache_with(data: bytes, of: Model = MODEL) -> RequestTemplateCache:
    cache = RequestTemplateCache()
    remember(cache, data, of=of)
    return cache


def plain(request_id: str = "", value: float = 0.0, **fields: Any) -> bytes:
    """A message as libraries write it."""
    arrays = {
        "x": fp32(2, 3) + np.float32(value),
        "k": np.array([1, 2]),
        "h": np.zeros((2, 2), np.float16),
    }
    return request(arrays, id=request_id, **fields).SerializeToString()


@given(st.text(max_size=300), st.text(max_size=300))
@reproducible
def test_an_id_of_any_length(first: str, second: str) -> None:
    cache = cache_with(plain(first))
    assert check(cache, plain(first, 7.0))
    assert check(cache, plain(second, 7.0)) == (len(first.encode()) == len(second.encode()))


@pytest.mark.parametrize("bad", [b"\xff", b"\xc3(", b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90\x80\x80"])
def test_an_id_that_is_no_text_goes_the_long_way_and_is_refused(bad: bytes) -> None:
    good = plain("a" * len(bad))
    cache = cache_with(good)
    data = good.replace(b"a" * len(bad), bad)
    assert cache.find(data, 0) is None
    with pytest.raises(Exception, match="is not a ModelInferRequest"):
        remember(RequestTemplateCache(), data)


def test_every_cut_and_every_changed_byte_of_a_message() -> None:
    data = plain("an id", parameters={"priority": pb.InferParameter(int64_param=1)})
    cache = cache_with(data)
    for at in range(len(data)):
        assert cache.find(data[:at], 0) is None
        for bit in range(8):
            check(cache, data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])


def test_large_messages_are_not_copied_and_small_ones_let_go() -> None:
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


@pytest.mark.parametrize(
    "data",
    [
        request({"x": fp32(1, 2)}, typed=True).SerializeToString(),
        request({"x": fp32(1, 2)}).SerializeToString()
        + field(3, b"one")
        + b"one"
        + field(3, b"two")
        + b"two",
        b"\x50\x00" + request({"x": fp32(1, 2)}).SerializeToString(),
        b"\x50\x01" + request({"x": fp32(1, 2)}).SerializeToString(),
        request({"x": fp32(1, 2)}).SerializeToString() + (field(100, b"") * 130),
        request({"x": fp32(1, 2)}).SerializeToString() + field(100, b"y" * 9000) + b"y" * 9000,
    ],
    ids=["typed", "two ids", "a number", "another number", "many fields", "much beside the values"],
)
def test_what_is_not_remembered_is_read_the_long_way_each_time(data: bytes) -> None:
    one = model("m", spec("x", "FP32", "batch", "n"))
    cache = cache_with(data, one)
    assert cache.find(data, 0) is None
    assert cache._by_size == {}
    assert told(remember(cache, data, of=one)) == told(remember(RequestTemplateCache(), data, of=one))


def test_strings_are_read_the_long_way() -> None:
    one = model("m", spec("s", "BYTES", "batch"))
    data = request({"s": np.array(["a"], dtype=object)}).SerializeToString()
    assert cache_with(data, one).find(data, 0) is None


def test_what_is_remembered_is_bounded() -> None:
    cache = RequestTemplateCache()
    for size in range(600):
        remember(cache, plain("i" * size))
        assert len(cache._by_size) <= request_templates._MAX_SIZES
    for number in range(100):
        timeout = pb.InferParameter(int64_param=1000 + number)
        remember(cache, plain(parameters={"timeout": timeout}))
        assert all(
            len(known) <= request_templates._MAX_ENTRIES_OF_A_SIZE for known in cache._by_size.values()
        )
    # The last few of a size are found, an older one is not, until it comes again.
    old = plain(parameters={"timeout": pb.InferParameter(int64_param=1001)})
    assert cache.find(old, 0) is None
    remember(cache, old)
    assert check(cache, old)


def test_the_responses_that_are_remembered_are_bounded() -> None:
    cache = RequestTemplateCache()
    for number in range(600):
        many = model(f"m{number}")
        data = plain(model=many.name)
        remember(cache, data, of=many)
        assert len(cache._responses) <= request_templates._MAX_SIZES


def test_another_generation_is_forgotten() -> None:
    cache = RequestTemplateCache()
    data = plain()
    first = remember(cache, data, 1)
    assert cache.find(data, 0) is None
    assert cache.find(data, 2) is None
    other = model()
    second = remember(cache, data, 2, of=other)
    assert cache.find(data, 1) is None
    found = cache.find(data, 2)
    assert found is not None
    assert (first.model, found[0].model) == (MODEL, other)
    assert found[0] is second
    assert second.response is not first.response


def test_what_was_looked_up_before_a_model_changed_is_not_remembered_after() -> None:
    """A slow reader of the old generation does not bring its models back, nor drive out the new."""
    cache = RequestTemplateCache()
    other = model()
    remember(cache, plain(), 2, of=other)
    old = remember(cache, plain("an id"), 1)
    assert old.model is MODEL
    assert cache.find(plain("an id"), 1) is None
    assert cache.find(plain("an id"), 2) is None
    assert cache.find(plain(), 2) is not None
    assert remember(cache, plain(), 2, of=other).response is not old.response


def _in_threads(count: int, work: Callable[[int], None]) -> None:
    failures: list[BaseException] = []
    together = threading.Barrier(count)

    def run(number: int) -> None:
        try:
            together.wait(PATIENCE)
            work(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert not failures, failures[0]


def test_threads_that_find_and_add_while_models_change_get_their_own() -> None:
    cache = RequestTemplateCache()
    models = [model() for _ in range(200)]

    def work(number: int) -> None:
        for generation, one in enumerate(models):
            for value in range(3):
                data = plain(f"{number}", float(value))
                found = cache.find(data, generation)
                form = remember(cache, data, generation, of=one) if found is None else found[0]
                assert form.model is one
                assert found is None or found[1] == str(number)

    _in_threads(4, work)
