"""Raw contents: every datatype makes the round trip, with the same bytes as tritonclient writes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import tritonclient.grpc as triton
from protos.arrays import same, sample
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor

from tensorferry.protos.tensors import (
    DATATYPES,
    TensorError,
    datatype,
    datatype_of,
    decode_raw,
    encode_raw,
    values,
)

SHAPES: list[tuple[int, ...]] = [(6,), (2, 3), (3, 2, 1), (1, 6, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", DATATYPES)
def test_round_trip(name: str, shape: tuple[int, ...]) -> None:
    array = sample(name).reshape(shape)
    assert same(decode_raw(encode_raw(array), datatype(name), shape), array)


@pytest.mark.parametrize("dtype", ["O", "U", "S"])
def test_strings_of_every_numpy_dtype(dtype: str) -> None:
    texts = np.array([["one", ""], ["a longer one", "4"]], dtype)
    expected = np.array([[b"one", b""], [b"a longer one", b"4"]], dtype=object)
    assert same(decode_raw(encode_raw(texts), datatype("BYTES"), (2, 2)), expected)
    assert same(decode_raw(encode_raw(texts.T), datatype("BYTES"), (2, 2)), expected.T)
    assert encode_raw(np.array("one", dtype)) == b"\3\0\0\0one"
    assert encode_raw(np.empty((0, 3), dtype)) == b""


def test_text_is_encoded_as_utf8_and_bytes_as_they_are() -> None:
    given = np.array(["\N{LATIN SMALL LETTER E WITH ACUTE}\0", b"\xff\0"], dtype=object)
    assert encode_raw(given) == b"\3\0\0\0\xc3\xa9\0" + b"\2\0\0\0\xff\0"
    assert encode_raw(given[:1].astype("U")) == b"\2\0\0\0\xc3\xa9"


@pytest.mark.parametrize("name", DATATYPES)
def test_scalars(name: str) -> None:
    array = sample(name)[1, 1].reshape(()) if name != "BYTES" else np.array(b"one", dtype=object)
    got = decode_raw(encode_raw(array), datatype(name), ())
    assert got.shape == ()
    assert same(got, array)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 2, 5), (1 << 40, 0)], ids=str)
@pytest.mark.parametrize("name", DATATYPES)
def test_no_elements(name: str, shape: tuple[int, ...]) -> None:
    array: npt.NDArray[Any] = np.empty(shape, DATATYPES[name].storage)
    assert encode_raw(array) == b""
    assert same(decode_raw(b"", datatype(name), shape), array)


@pytest.mark.parametrize("name", DATATYPES)
def test_the_bytes_are_those_of_tritonclient(name: str) -> None:
    array = sample(name)
    given = triton.InferInput("x", [2, 3], name)
    given.set_data_from_numpy(values(array, name))
    assert encode_raw(values(array, name)) == given._get_content()


def test_bytes_tensors_are_read_by_tritonclient_and_the_other_way_round() -> None:
    array = sample("BYTES")
    assert deserialize_bytes_tensor(encode_raw(array)).tolist() == array.reshape(-1).tolist()
    assert same(decode_raw(serialize_byte_tensor(array).item(), datatype("BYTES"), array.shape), array)


@pytest.mark.parametrize("order", ["C", "F", "reversed", "strided", "broadcast"])
@pytest.mark.parametrize("name", ["INT16", "FP64", "BYTES", "BOOL"])
def test_any_memory_layout_is_written_in_row_major_order(name: str, order: str) -> None:
    array = sample(name)
    laid_out = {
        "C": array,
        "F": np.asfortranarray(array),
        "reversed": array[::-1, ::-1],
        "strided": np.repeat(array, 2, axis=1)[:, ::2],
        "broadcast": np.broadcast_to(array[0], (4, 3)),
    }[order]
    got = decode_raw(encode_raw(laid_out), datatype(name), laid_out.shape)
    assert same(got, laid_out.copy(order="C"))


@pytest.mark.parametrize("name", [n for n, d in DATATYPES.items() if d.storage.kind in "iuf" and n != "BF16"])
def test_big_endian_arrays_travel_little_endian(name: str) -> None:
    array = sample(name)
    big = array.astype(array.dtype.newbyteorder(">"))
    assert datatype_of(big) == name
    assert encode_raw(big) == array.tobytes()


def test_numpy_strings_travel_as_bytes() -> None:
    expected = encode_raw(np.array([b"a", "é".encode()], dtype=object))
    assert encode_raw(np.array(["a", "é"])) == expected
    assert encode_raw(np.array([b"a", "é".encode()])) == expected
    assert encode_raw(np.array(["a", "é"], dtype=object)) == expected


def test_bf16_values_are_ml_dtypes() -> None:
    bits = sample("BF16")
    array = values(decode_raw(bits.tobytes(), datatype("BF16"), (2, 3)), "BF16")
    assert array.dtype == ml_dtypes.bfloat16
    assert datatype_of(array) == "BF16"
    assert array[0, 2] == 1.0
    assert encode_raw(array) == bits.tobytes()


@pytest.mark.parametrize("name", [n for n, d in DATATYPES.items() if d.size])
def test_numeric_arrays_are_views_of_the_bytes(name: str) -> None:
    raw = encode_raw(sample(name))
    array = decode_raw(raw, datatype(name), (2, 3))
    assert not array.flags.writeable
    assert not array.flags.owndata


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(1, np.complex64),
        np.zeros(1, "M8[s]"),
        np.zeros(1, "m8[s]"),
        np.zeros(1, [("a", "i4")]),
        np.zeros(1, np.longdouble),
        np.zeros(1, ml_dtypes.float8_e4m3fn),
    ],
    ids=lambda array: str(array.dtype),
)
def test_arrays_without_a_datatype(array: npt.NDArray[Any]) -> None:
    with pytest.raises(
        TensorError, match="has no datatype in the protocol; convert the array to one of bool"
    ):
        encode_raw(array)


@pytest.mark.parametrize(
    ("element", "message"),
    [(1, "bytes or str, got int"), (None, "got NoneType"), ("\ud800", "cannot be UTF-8")],
)
def test_elements_that_are_no_strings(element: object, message: str) -> None:
    with pytest.raises(TensorError, match=message):
        encode_raw(np.array([b"fine", element], dtype=object))


def test_unknown_datatypes() -> None:
    with pytest.raises(TensorError, match="datatype 'fp32' is not one of BOOL, INT8"):
        datatype("fp32")
