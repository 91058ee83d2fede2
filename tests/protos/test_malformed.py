"""Contents that do not fit their datatype or shape raise a TensorError that says what was expected."""

from __future__ import annotations

import pytest

from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos.tensors import (
    DATATYPES,
    TensorError,
    check_raw,
    datatype,
    decode_contents,
    decode_raw,
)


@pytest.mark.parametrize(
    ("raw", "shape", "message"),
    [
        (b"\0\0\0", (1,), r"at least 4 bytes of length prefixes, got 3"),
        (b"\xff\xff\xff\xffabc", (1,), r"element 0 should have 4294967295 bytes, only 3 are left"),
        (b"\5\0\0\0abcde", (2,), r"expected 2, got 1"),
        (b"\1\0\0\0a\1\0\0", (1,), r"expected 1, 3 bytes are left over"),
        (b"\2\0\0\0ab\1\0\0", (2,), r"incomplete length prefix of BYTES element 1: 3 of 4 bytes"),
        (b"\0\0\0\0", (0,), r"expected 0, 4 bytes are left over"),
    ],
)
def test_malformed_bytes_elements(raw: bytes, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(TensorError, match=message):
        decode_raw(raw, datatype("BYTES"), shape)


def test_numeric_contents_of_another_size() -> None:
    for name, kind in DATATYPES.items():
        size = 6 * kind.size
        for given in (size - 1, size + 1) if size else ():
            message = rf"{name} of shape \[2, 3\] takes {size} bytes, got {given}"
            with pytest.raises(TensorError, match=message):
                decode_raw(bytes(given), kind, (2, 3))


HUGE = 1 << 62
SHAPES = {
    "negative": ((-1, 2), r"shape \[-1, 2\] has the negative dimension -1"),
    "two negatives": ((-2, -3), "negative dimension -2"),
    "too large for its bytes": ((0, HUGE, HUGE), "larger than an array can be"),
    "overflows": ((HUGE, 4, 0), "larger than an array can be"),
    "too many dimensions": ((1,) * 33, "33 dimensions; at most 32"),
}


@pytest.mark.parametrize("case", SHAPES)
@pytest.mark.parametrize("name", ["FP32", "BYTES"])
def test_shapes_that_no_array_has(name: str, case: str) -> None:
    shape, message = SHAPES[case]
    kind = datatype(name)
    for decode in (check_raw, decode_raw):
        with pytest.raises(TensorError, match=message):
            decode(b"", kind, shape)
    with pytest.raises(TensorError, match=message):
        decode_contents(pb.InferTensorContents(), kind, shape)


def test_nothing_is_allocated_for_a_shape_that_the_bytes_do_not_fill() -> None:
    with pytest.raises(TensorError, match="takes 4503599627370496 bytes, got 3"):
        decode_raw(b"abc", datatype("FP32"), (1 << 50,))
    with pytest.raises(TensorError, match="at least 4503599627370496 bytes"):
        decode_raw(b"abc", datatype("BYTES"), (1 << 50,))
