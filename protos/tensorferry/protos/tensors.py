"""Datatypes of the Open Inference Protocol, and the codecs of their two encodings.

Raw contents are the elements in row-major order, little-endian, without gaps. An element of a BYTES tensor is its length
as four little-endian bytes, then its bytes. Typed contents are the repeated fields of `InferTensorContents`; FP16 and
BF16 have no such field and are always raw.

In memory a tensor is a numpy array. BYTES is an object array of `bytes`. BF16 is its bits in uint16 (`storage`), or
`ml_dtypes.bfloat16` if that package is installed (`values`). The encoders also take `str` elements, as UTF-8, and arrays
of dtype S and U. numpy drops NULs at the end of an element of these two dtypes, but not of an object array.

Every function is pure and may be called from any thread.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos.errors import TensorError as TensorError

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Datatype:
    """One datatype of the protocol.

    `storage` is the numpy dtype of its elements, object for BYTES. `size` is an element's bytes on the wire, 0 for BYTES,
    whose elements vary. `contents` is its field of `InferTensorContents`; None if the protocol has none.
    """

    name: str
    storage: np.dtype[Any]
    size: int
    contents: str | None


DATATYPES: dict[str, Datatype] = {
    name: Datatype(name, np.dtype(storage), np.dtype(storage).itemsize if name != "BYTES" else 0, contents)
    for name, storage, contents in (
        ("BOOL", "?", "bool_contents"),
        ("INT8", "i1", "int_contents"),
        ("INT16", "<i2", "int_contents"),
        ("INT32", "<i4", "int_contents"),
        ("INT64", "<i8", "int64_contents"),
        ("UINT8", "u1", "uint_contents"),
        ("UINT16", "<u2", "uint_contents"),
        ("UINT32", "<u4", "uint_contents"),
        ("UINT64", "<u8", "uint64_contents"),
        ("FP16", "<f2", None),
        ("FP32", "<f4", "fp32_contents"),
        ("FP64", "<f8", "fp64_contents"),
        ("BF16", "<u2", None),
        ("BYTES", "O", "bytes_contents"),
    )
}
# The dtypes of the fields of `InferTensorContents`. numpy alone would make float64 of small and large UINT64 together.
_FIELD_DTYPES = {
    "bool_contents": np.dtype("?"),
    "int_contents": np.dtype("<i4"),
    "int64_contents": np.dtype("<i8"),
    "uint_contents": np.dtype("<u4"),
    "uint64_contents": np.dtype("<u8"),
    "fp32_contents": np.dtype("<f4"),
    "fp64_contents": np.dtype("<f8"),
}
# The length before each element of BYTES.
_LENGTH = struct.Struct("<I")
# The limits of every supported numpy. Checked, because a shape with a 0 can be of any length without any bytes.
_MAX_DIMENSIONS = 32
_MAX_BYTES = (1 << 63) - 1
_BY_STORAGE = {d.storage: name for name, d in DATATYPES.items() if name != "BF16"}


def datatype(name: str) -> Datatype:
    """Return the datatype of this name. TensorError, with the known names, for an unknown one."""
    try:
        return DATATYPES[name]
    except KeyError:
        raise TensorError(f"datatype {name!r} is not one of {', '.join(DATATYPES)}") from None


def datatype_of(array: Array) -> str:
    """Return the name of a numpy array's datatype. TensorError if the protocol has none."""
    dtype = array.dtype
    if dtype.name == "bfloat16":
        return "BF16"
    if dtype.kind in "SUT":
        return "BYTES"
    name = _BY_STORAGE.get(dtype.newbyteorder("<") if dtype.kind in "iuf" else dtype)
    if name is None:
        raise TensorError(
            f"numpy dtype {dtype} has no datatype in the protocol; convert the array to one of "
            + ", ".join(str(d.storage) for d in DATATYPES.values())
        )
    return name


def element_count(shape: Sequence[int]) -> int:
    """Return the number of elements of this shape. TensorError for a shape that no array can have."""
    if len(shape) > _MAX_DIMENSIONS:
        raise TensorError(f"the shape has {len(shape)} dimensions; at most {_MAX_DIMENSIONS} are supported")
    for size in shape:
        if size < 0:
            raise TensorError(
                f"shape {list(shape)} has the negative dimension {size}; a request's shape must be concrete"
            )
    if 8 * math.prod(size or 1 for size in shape) > _MAX_BYTES:
        raise TensorError(f"shape {list(shape)} is larger than an array can be")
    return math.prod(shape)


def encode_raw(array: Array) -> bytes:
    """Return the raw contents of an array of any memory layout."""
    if datatype_of(array) == "BYTES":
        return _encode_bytes_elements(array)
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    return array.tobytes()


def check_raw(raw: bytes, kind: Datatype, shape: Sequence[int]) -> None:
    """Check the size of raw contents, before anything is allocated. TensorError if it does not fit.

    For BYTES the smallest possible size is checked here, and the elements in `decode_raw`.
    """
    count = element_count(shape)
    if kind.size:
        if len(raw) != count * kind.size:
            raise TensorError(
                f"{kind.name} of shape {list(shape)} takes {count * kind.size} bytes, got {len(raw)}"
            )
    elif len(raw) < 4 * count:
        raise TensorError(
            f"BYTES of shape {list(shape)} takes at least {4 * count} bytes of length prefixes, got {len(raw)}"
        )


def decode_raw(raw: bytes, kind: Datatype, shape: Sequence[int]) -> Array:
    """Return the array in raw contents, in `storage` form. It is a read-only view, except for BYTES."""
    check_raw(raw, kind, shape)
    if kind.size:
        return np.frombuffer(raw, dtype=kind.storage).reshape(tuple(shape))
    elements = np.empty(element_count(shape), dtype=object)
    elements[:] = _decode_bytes_elements(raw, len(elements))
    return elements.reshape(tuple(shape))


def values(array: Array, name: str) -> Array:
    """Return a stored array as values: the bits of BF16 become `ml_dtypes.bfloat16`.

    TensorError for BF16 if the package ml_dtypes is not installed.
    """
    if name != "BF16":
        return array
    try:
        import ml_dtypes
    except ModuleNotFoundError:
        raise TensorError("a BF16 tensor needs the package ml_dtypes (pip install ml_dtypes)") from None
    return array.view(ml_dtypes.bfloat16)


def from_numbers(value: object, kind: Datatype) -> Array:
    """Return a number, nested lists of numbers, or what has `__array__`, in `storage` form. Any datatype but BYTES.

    Floats are rounded. TensorError if the datatype cannot hold the kind of the numbers, or one of them.
    """
    try:
        given = np.asarray(value)
        if given.dtype.kind == "f" and kind.name == "UINT64":
            # Numpy makes floats of integers of which some are 2**63 or more, and others less.
            elements = np.asarray(value, object)
            given = elements if all(isinstance(one, (int, np.integer)) for one in elements.flat) else given
        held = given.dtype.kind in "iuO" and kind.storage.kind in "iu"
        held = held or np.can_cast(given.dtype, kind.storage, "same_kind")
        if given.size and (not held or kind.name == "BF16"):
            raise TypeError(f"its elements are {given.dtype}")
        with np.errstate(over="raise"):
            array = given.astype(kind.storage)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise TensorError(str(error)) from None
    # Numpy lets integers wrap around.
    if kind.storage.kind in "iu" and not np.array_equal(given, array):
        raise TensorError(f"an element is out of bounds for {kind.name}")
    return array


def decode_contents(contents: pb.InferTensorContents, kind: Datatype, shape: Sequence[int]) -> Array:
    """Return the array in typed contents, in `storage` form.

    TensorError if a field of another datatype is filled, the number of elements is not that of the shape, or a value is
    out of range.
    """
    filled = [field.name for field, _ in contents.ListFields()]
    if kind.contents is None:
        raise TensorError(f"{kind.name} has no typed contents; send it in raw_input_contents")
    if any(field != kind.contents for field in filled):
        raise TensorError(f"{kind.name} travels in {kind.contents}, got {', '.join(filled)}")
    values_given = getattr(contents, kind.contents)
    count = element_count(shape)
    if len(values_given) != count:
        raise TensorError(
            f"shape {list(shape)} takes {count} elements in {kind.contents}, got {len(values_given)}"
        )
    if kind.name == "BYTES":
        elements = np.empty(count, dtype=object)
        elements[:] = list(values_given)
        return elements.reshape(tuple(shape))
    wide = _numbers(contents, kind.contents, count)
    if kind.size < wide.dtype.itemsize and kind.storage.kind in "iu" and count:
        info = np.iinfo(kind.storage)
        low, high = int(wide.min()), int(wide.max())
        if low < info.min or high > info.max:
            raise TensorError(
                f"{kind.name} holds {info.min} to {info.max}, got {low if low < info.min else high}"
            )
    return wide.astype(kind.storage).reshape(tuple(shape))


def _numbers(contents: pb.InferTensorContents, field: str, count: int) -> Array:
    """Return the values of the only filled field, in the field's dtype."""
    dtype = _FIELD_DTYPES[field]
    if not count or dtype.kind in "iu":
        return np.array(getattr(contents, field), dtype)
    # Floats and booleans are serialised as they are in memory. Reading those bytes takes a twentieth of the time of making
    # Python objects. One byte, the tag, and the length come first.
    data = contents.SerializeToString()
    at = 1
    while data[at] > 127:
        at += 1
    return np.frombuffer(data, dtype, count, at + 1)


def encode_contents(array: Array, kind: Datatype, contents: pb.InferTensorContents) -> None:
    """Write a stored array into typed contents. TensorError for a datatype that has none."""
    if kind.contents is None:
        raise TensorError(f"{kind.name} has no typed contents")
    flat = array.reshape(-1)
    if kind.name == "BYTES":
        contents.bytes_contents.extend([_as_bytes(element) for element in flat.tolist()])
    else:
        getattr(contents, kind.contents).extend(flat.tolist())


def _as_bytes(element: object) -> bytes:
    if isinstance(element, bytes):
        return element
    if isinstance(element, str):
        try:
            return element.encode()
        except UnicodeEncodeError as error:
            raise TensorError(f"an element of a BYTES tensor cannot be UTF-8 ({error})") from None
    raise TensorError(f"an element of a BYTES tensor must be bytes or str, got {type(element).__name__}")


def _encode_bytes_elements(array: Array) -> bytes:
    parts: list[bytes] = []
    for element in array.reshape(-1).tolist():
        data = _as_bytes(element)
        parts += (len(data).to_bytes(4, "little"), data)
    return b"".join(parts)


def _decode_bytes_elements(raw: bytes, count: int) -> list[bytes]:
    elements: list[bytes] = []
    at, end = 0, len(raw)
    length_at = _LENGTH.unpack_from
    for _ in range(count):
        start = at + 4
        if start > end:
            break
        at = start + length_at(raw, at)[0]
        elements.append(raw[start:at])
    if at > end:
        length = at - start
        raise TensorError(
            f"BYTES element {len(elements) - 1} should have {length} bytes, only {end - start} are left"
        )
    if len(elements) == count and at < end:
        raise TensorError(
            f"unexpected number of BYTES elements: expected {count}, {end - at} bytes are left over"
        )
    if at < end:
        raise TensorError(f"incomplete length prefix of BYTES element {len(elements)}: {end - at} of 4 bytes")
    if len(elements) != count:
        raise TensorError(f"unexpected number of BYTES elements: expected {count}, got {len(elements)}")
    return elements
