"""Raw contents: every datatype makes the round trip, with the same bytes as tritonclient writes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import tritonclient.grpc as triton
from protos.arrays import same, sample

from tensorferry.protos.tensors import (
    DATATYPES,
    TensorError,
    datatype,
    datatype_of,
    decode_raw,
    encode_raw,
    values,
)

NUMERIC = [name for name, kind in DATATYPES.items() if kind.size]


@pytest.mark.parametrize("name", DATATYPES)
def test_round_trip_with_the_bytes_of_tritonclient(name: str) -> None:
    kind, array = datatype(name), sample(name)
    given = triton.InferInput("x", [2, 3], name)
    given.set_data_from_numpy(values(array, name))
    raw = encode_raw(values(array, name))
    assert raw == given._get_content()
    for shape in ((2, 3), (6,), (3, 2, 1)):
        assert same(decode_raw(raw, kind, shape), array.reshape(shape))
    scalar = array[:1, 1].reshape(())
    assert same(decode_raw(encode_raw(scalar), kind, ()), scalar)
    for shape in ((0,), (3, 0), (1 << 40, 0)):
        empty: npt.NDArray[Any] = np.empty(shape, kind.storage)
        assert encode_raw(empty) == b""
        assert same(decode_raw(b"", kind, shape), empty)


# numpy 1 has no T.
@pytest.mark.parametrize("dtype", ["O", "U", "S"] if np.__version__ < "2" else ["O", "U", "S", "T"])
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


@pytest.mark.parametrize("name", ["INT16", "BYTES"])
def test_any_memory_layout_is_written_in_row_major_order(name: str) -> None:
    array = sample(name)
    strided = np.repeat(array, 2, axis=1)[:, ::2]
    for laid_out in (np.asfortranarray(array), array[::-1, ::-1], strided, np.broadcast_to(array[0], (4, 3))):
        got = decode_raw(encode_raw(laid_out), datatype(name), laid_out.shape)
        assert same(got, laid_out.copy(order="C"))


def test_big_endian_arrays_are_sent_little_endian() -> None:
    array = sample("INT16")
    big = array.astype(array.dtype.newbyteorder(">"))
    assert datatype_of(big) == "INT16"
    assert encode_raw(big) == array.tobytes()


def test_bf16_values_are_ml_dtypes() -> None:
    bits = sample("BF16")
    array = values(decode_raw(bits.tobytes(), datatype("BF16"), (2, 3)), "BF16")
    assert array.dtype == ml_dtypes.bfloat16
    assert datatype_of(array) == "BF16"
    assert array[0, 2] == 1.0
    assert encode_raw(array) == bits.tobytes()


def test_numeric_arrays_are_views_of_the_bytes() -> None:
    for name in NUMERIC:
        array = decode_raw(encode_raw(sample(name)), datatype(name), (2, 3))
        assert not array.flags.writeable
        assert not array.flags.owndata


@pytest.mark.parametrize(
    "dtype", [np.complex64, "M8[s]", [("a", "i4")], np.longdouble, ml_dtypes.float8_e4m3fn]
)
def test_arrays_without_a_datatype(dtype: Any) -> None:
    with pytest.raises(
        TensorError, match="has no datatype in the protocol; convert the array to one of bool"
    ):
        encode_raw(np.zeros(1, dtype))


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
