"""Arbitrary bytes, fields and shapes give an array of that datatype and shape, or a TensorError."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from protos.arrays import reproducible

from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos.tensors import (
    DATATYPES,
    TensorError,
    datatype,
    decode_contents,
    decode_raw,
    encode_raw,
)

names = st.sampled_from(list(DATATYPES))
dims = st.one_of(st.integers(0, 4), st.sampled_from([-1, 1 << 31, 1 << 61, (1 << 63) - 1, -(1 << 63)]))
shapes = st.lists(dims, max_size=5) | st.lists(st.just(1), min_size=30, max_size=70)
# Small length prefixes, so that BYTES elements are found.
raws = st.binary(max_size=64) | st.lists(
    st.builds(lambda n, data: n.to_bytes(4, "little") + data, st.integers(0, 6), st.binary(max_size=6)),
    max_size=6,
).map(b"".join)


@given(names, raws, shapes)
@reproducible
def test_raw(name: str, raw: bytes, shape: list[int]) -> None:
    kind = datatype(name)
    try:
        array = decode_raw(raw, kind, shape)
    except TensorError:
        return
    assert (array.dtype, array.shape) == (kind.storage, tuple(shape))
    assert encode_raw(array) == raw


@given(names.filter(lambda name: DATATYPES[name].size > 0), st.data())
@reproducible
def test_raw_of_the_right_size(name: str, data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 3), max_size=4))
    size = int(np.prod(shape)) * DATATYPES[name].size
    array = decode_raw(data.draw(st.binary(min_size=size, max_size=size)), datatype(name), shape)
    assert array.shape == tuple(shape)


@given(st.lists(st.binary(max_size=5), max_size=8))
@reproducible
def test_bytes_elements(elements: list[bytes]) -> None:
    raw = encode_raw(np.array([*elements, b""], dtype=object)[:-1])
    assert decode_raw(raw, datatype("BYTES"), [len(elements)]).tolist() == elements


@given(names, st.binary(max_size=64), shapes)
@reproducible
def test_typed(name: str, data: bytes, shape: list[int]) -> None:
    try:
        contents = pb.InferTensorContents.FromString(data)
    except Exception:
        return
    _decode_typed(contents, name, shape)


@given(
    names,
    st.builds(
        pb.InferTensorContents,
        bool_contents=st.lists(st.booleans(), max_size=2),
        int_contents=st.lists(st.integers(-(1 << 31), (1 << 31) - 1), max_size=3),
    )
    | st.builds(pb.InferTensorContents, uint64_contents=st.lists(st.integers(0, (1 << 64) - 1), max_size=4))
    | st.builds(pb.InferTensorContents, uint_contents=st.lists(st.integers(0, (1 << 32) - 1), max_size=4))
    | st.builds(pb.InferTensorContents, fp32_contents=st.lists(st.floats(width=32), max_size=4))
    | st.builds(pb.InferTensorContents, bytes_contents=st.lists(st.binary(max_size=4), max_size=4)),
    st.lists(st.integers(0, 3), max_size=2),
)
@reproducible
def test_typed_fields(name: str, contents: pb.InferTensorContents, shape: list[int]) -> None:
    _decode_typed(contents, name, shape)


def _decode_typed(contents: pb.InferTensorContents, name: str, shape: list[int]) -> None:
    kind = datatype(name)
    try:
        array = decode_contents(contents, kind, shape)
    except TensorError:
        return
    assert (array.dtype, array.shape) == (kind.storage, tuple(shape))
    assert kind.contents is not None
    given = list(getattr(contents, kind.contents))
    np.testing.assert_array_equal(array.reshape(-1), np.array(given, dtype=kind.storage))
