"""Typed contents: every datatype with a field makes the round trip; others and bad values are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from protos.arrays import same, sample

from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos.tensors import DATATYPES, TensorError, datatype, decode_contents, encode_contents

TYPED = [name for name, d in DATATYPES.items() if d.contents]
FILL: dict[str, list[Any]] = {
    "bool_contents": [True], "int_contents": [1], "int64_contents": [1], "uint_contents": [1],
    "uint64_contents": [1], "fp32_contents": [1.0], "fp64_contents": [1.0], "bytes_contents": [b"1"],
}  # fmt: skip


def typed(name: str, array: npt.NDArray[Any]) -> pb.InferTensorContents:
    contents = pb.InferTensorContents()
    encode_contents(array, datatype(name), contents)
    # Over the wire, where a field drops what it cannot hold.
    return pb.InferTensorContents.FromString(contents.SerializeToString())


@pytest.mark.parametrize("name", TYPED)
def test_round_trip(name: str) -> None:
    kind, array = datatype(name), sample(name)
    assert same(decode_contents(typed(name, array), kind, (2, 3)), array)
    scalar = array[0, 1:2].reshape(())
    assert same(decode_contents(typed(name, scalar), kind, ()), scalar)
    empty: npt.NDArray[Any] = np.empty((2, 0), kind.storage)
    assert same(decode_contents(typed(name, empty), kind, (2, 0)), empty)


def test_strings_of_every_numpy_dtype() -> None:
    """Text is encoded as UTF-8, and bytes as they are; in row-major order."""
    for dtype in ("O", "U", "S"):
        texts = np.array([["one", ""], ["a longer one", "4"]], dtype)
        assert typed("BYTES", texts.T).bytes_contents == [b"one", b"a longer one", b"", b"4"]
        assert typed("BYTES", np.array("one", dtype)).bytes_contents == [b"one"]
    given = np.array(["\N{LATIN SMALL LETTER E WITH ACUTE}\0", b"\xff\0"], dtype=object)
    assert typed("BYTES", given).bytes_contents == [b"\xc3\xa9\0", b"\xff\0"]


@pytest.mark.parametrize("name", ["FP16", "BF16"])
def test_half_floats_have_no_typed_contents(name: str) -> None:
    with pytest.raises(TensorError, match=f"{name} has no typed contents; send it in raw_input_contents"):
        decode_contents(pb.InferTensorContents(fp32_contents=[1.0]), datatype(name), (1,))
    with pytest.raises(TensorError, match="no typed contents"):
        encode_contents(sample(name), datatype(name), pb.InferTensorContents())


def test_another_field_than_the_datatypes() -> None:
    for name in TYPED:
        own = DATATYPES[name].contents
        for field in FILL.keys() - {own}:
            contents = pb.InferTensorContents(**{field: FILL[field]})
            with pytest.raises(TensorError, match=f"{name} travels in {own}, got {field}"):
                decode_contents(contents, datatype(name), (1,))
    contents = pb.InferTensorContents(int_contents=[1], fp32_contents=[1.0])
    with pytest.raises(TensorError, match="INT32 travels in int_contents, got int_contents, fp32_contents"):
        decode_contents(contents, datatype("INT32"), (1,))


@pytest.mark.parametrize("count", [0, 7])
def test_another_number_of_elements(count: int) -> None:
    contents = pb.InferTensorContents(fp32_contents=[0.0] * count)
    with pytest.raises(TensorError, match=rf"shape \[2, 3\] takes 6 elements in fp32_contents, got {count}"):
        decode_contents(contents, datatype("FP32"), (2, 3))


@pytest.mark.parametrize(
    ("name", "field", "value", "message"),
    [
        ("INT8", "int_contents", 128, "INT8 holds -128 to 127, got 128"),
        ("INT8", "int_contents", -129, "INT8 holds -128 to 127, got -129"),
        ("UINT16", "uint_contents", 65536, "UINT16 holds 0 to 65535, got 65536"),
    ],
)
def test_values_out_of_the_datatypes_range(name: str, field: str, value: int, message: str) -> None:
    contents = pb.InferTensorContents(**{field: [0, value, 1]})  # type: ignore[arg-type]
    with pytest.raises(TensorError, match=message):
        decode_contents(contents, datatype(name), (3,))


def test_small_and_great_uint64_lose_nothing() -> None:
    given = [1, (1 << 64) - 1, (1 << 63) + 1, (1 << 53) + 1]
    for order in (given, given[::-1]):
        contents = pb.InferTensorContents(uint64_contents=order)
        assert decode_contents(contents, datatype("UINT64"), (4,)).tolist() == order


@pytest.mark.parametrize("count", [1, 32, 4096, 20_000])
def test_floats_of_any_length_with_unknown_fields_behind(count: int) -> None:
    """Floats are read from the serialised field, whose length prefix takes one to three bytes."""
    for name in ("FP32", "FP64", "BOOL"):
        array = np.arange(count).astype(datatype(name).storage)
        data = typed(name, array).SerializeToString() + b"\xa8\x06\x01"
        contents = pb.InferTensorContents.FromString(data)
        assert same(decode_contents(contents, datatype(name), (count,)), array)
