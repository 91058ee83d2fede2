"""Requests of sequences match one template whatever the id of their sequence is."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from support.server.rig import fp32, request, signature, spec

from tensorferry.batcher import SequenceTag, StatefulBatcher, StateTensor
from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.errors import InvalidRequestError
from tensorferry.server.inference.requests.codec import decode_request
from tensorferry.server.inference.requests.request_templates import Match, RequestTemplateCache
from tensorferry.server.inference.shared_memory.regions import RegionLease, Regions
from tensorferry.server.models.lifecycle.model import Model


@pytest.fixture
def model() -> Iterator[Model]:
    state = StateTensor("past", "next", np.zeros((1, 2), np.float32))
    with StatefulBatcher(lambda inputs: inputs, [state], max_batch_size=4) as batcher:
        yield Model("m", "1", signature(spec("x", "FP32", "n", 2)), 4, "", batcher)


def message(number: int | str | None, *, start: bool = False, end: bool = False, kind: str = "") -> bytes:
    made = request({"x": fp32(1, 2)}, model="m")
    if number is not None:
        kind = kind or ("string_param" if isinstance(number, str) else "int64_param")
        setattr(made.parameters["sequence_id"], kind, number)
    for name, value in (("sequence_start", start), ("sequence_end", end)):
        if value:
            made.parameters[name].bool_param = True
    return bytes(made.SerializeToString(deterministic=True))


def add(cache: RequestTemplateCache, model: Model, data: bytes) -> SequenceTag:
    parsed = type(request({"x": fp32(1, 2)})).FromString(data)
    decoded = decode_request(parsed, "m", model.signature, model.batched, RegionLease(Regions()))
    tag = cache.add(data, parsed, model, decoded, 0).sequence
    assert tag is not None
    return tag


def tag_of(found: Match | None) -> SequenceTag | None:
    return None if found is None else found[4]


@pytest.mark.parametrize(
    ("known", "others", "apart"),
    [
        (5, [1, 127], [128, -1, 2**62, "5"]),
        (2**62, [2**61 + 5, 2**56], [-1, 5]),
        (-1, [-(2**63), -7], [5]),
        ("abc", ["xyz", "äb"], ["abcd", "", 5]),
    ],
)
def test_ids_of_one_size_match(
    model: Model, known: int | str, others: list[int | str], apart: list[int | str]
) -> None:
    cache = RequestTemplateCache()
    assert add(cache, model, message(known, end=True)) == SequenceTag(
        known, end=True, wanted=frozenset({"x"})
    )
    for number in (known, *others):
        found = tag_of(cache.find(message(number, end=True), 0))
        assert found == SequenceTag(number, end=True, wanted=frozenset({"x"}))
        # Another flag is another template.
        assert cache.find(message(number, start=True), 0) is None
        assert cache.find(message(number), 0) is None
    for number in apart:
        assert cache.find(message(number, end=True), 0) is None


def test_an_id_has_a_bound(model: Model) -> None:
    cache = RequestTemplateCache()
    add(cache, model, message("ä" * 256))
    assert cache.find(message("x" * 512), 0) is None
    with pytest.raises(
        InvalidRequestError, match="'sequence_id' has 257 characters; it must have at most 256"
    ):
        add(RequestTemplateCache(), model, message("x" * 257))


def test_no_id_matches_that_of_a_request_without_a_sequence(model: Model) -> None:
    alone = SequenceTag(None, start=True, end=True, wanted=frozenset({"x"}))
    cache = RequestTemplateCache()
    for number in (None, 0, ""):
        assert add(cache, model, message(number)) == alone
    assert tag_of(cache.find(message(None), 0)) == alone
    assert cache.find(message(7), 0) is None
    add(cache, model, message(7))
    assert tag_of(cache.find(message(0), 0)) == alone


def test_an_id_that_must_be_parsed_matches_nothing(model: Model) -> None:
    cache = RequestTemplateCache()
    add(cache, model, data := message(300))
    at = data.index(b"\xac\x02")
    assert tag_of(cache.find(data, 0)) == SequenceTag(300, wanted=frozenset({"x"}))
    for wrong in (b"\x05\x05", b"\xac\x82"):
        assert cache.find(data[:at] + wrong + data[at + 2 :], 0) is None
    add(cache, model, data := message("ab"))
    at = data.index(b"ab", data.index(b"sequence_id"))
    assert cache.find(data[:at] + b"\xff\xff" + data[at + 2 :], 0) is None
    twice = message(5) + message(5)[len(message(None)) :]
    assert cache.find(twice, 0) is None


def test_a_parameter_whose_last_form_is_unusual_makes_no_template(model: Model) -> None:
    """The parser takes the last entry of a key, and the last choice in it."""
    known, choice = pb.ModelInferRequest(), pb.InferParameter(int64_param=9).SerializeToString()
    known.parameters["sequence_id"].int64_param = 9
    entry = known.SerializeToString()
    repeated = entry.replace(bytes([len(entry) - 2]), bytes([len(entry)]), 1)[: -len(choice) - 1]
    repeated += bytes([2 * len(choice)]) + 2 * choice
    cache = RequestTemplateCache()
    data = message(7) + repeated
    assert add(cache, model, data).id == 9
    assert cache.find(data, 0) is None
