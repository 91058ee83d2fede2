"""Comparison of a request with the model's metadata, before it is sent.

Pure and thread-safe functions. All raise `InvalidInput`, which says what was expected, what was
received and what to change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from tensorferry.client.errors import InvalidInput
from tensorferry.client.messages import frames
from tensorferry.client.messages.arguments import quoted
from tensorferry.client.messages.frames import Frame
from tensorferry.client.messages.metadata import ModelMetadata, TensorMetadata, check_names, subject_of
from tensorferry.protos import tensors
from tensorferry.protos.tensors import Array

FLOATS = ("FP16", "FP32", "FP64", "BF16")


def check_inputs(inputs: Mapping[str, object], model: ModelMetadata) -> dict[str, Array]:
    """Return the request's arrays, in the order of the model's inputs.

    Arrays are never cast. A list, a tuple or a Python scalar becomes an array of the expected
    datatype if that loses nothing. Python floats round to the nearest value of a float datatype,
    as in numpy. The values of a column are treated like a list.

    If the metadata names no inputs, the values are converted as without metadata, and only the
    server can check them.
    """
    inputs = frames.columns_for(inputs, model)
    if not model.inputs:
        return _undeclared(inputs, model)
    if isinstance(inputs, Frame):
        return {
            tensor.name: _from_columns(columns, tensor, model)
            for tensor, columns in frames.pieces(inputs, model)
        }
    check_names(model, "inputs", inputs)
    return {
        tensor.name: _check_input(inputs[tensor.name], tensor, model.name)
        for tensor in model.inputs
        if tensor.name in inputs
    }


def check_outputs(outputs: Iterable[str], model: ModelMetadata) -> None:
    """Check that the model has each requested output, if its metadata names outputs."""
    if not model.outputs:
        return
    known = {tensor.name for tensor in model.outputs}
    unknown = [name for name in outputs if name not in known]
    if unknown:
        raise InvalidInput(
            f"model {model.name!r}",
            f"outputs out of {quoted(t.name for t in model.outputs)}",
            quoted(outputs),
            f"remove {quoted(unknown)}",
        )


def dtype_of(datatype: str) -> np.dtype[Any]:
    """Return the numpy dtype of a datatype, object for BYTES; raise TensorError for none, or for BF16 without ml_dtypes."""
    return tensors.values(np.empty(0, tensors.datatype(datatype).storage), datatype).dtype


def dtype_for(tensor: TensorMetadata, subject: str) -> np.dtype[Any]:
    """Return the numpy dtype of an input; raise InvalidInput if there is none."""
    try:
        return dtype_of(tensor.datatype)
    except tensors.TensorError as error:
        raise InvalidInput(subject, str(tensor), "a datatype that cannot be converted", str(error)) from None


def array_of(name: str, value: object) -> Array:
    """Convert a value to an array without metadata; numpy chooses the dtype."""
    array = _as_array(value, f"input {name!r}", "an array")
    if array.dtype.kind in "SU" and array is not value:
        array = _as_array(value, f"input {name!r}", "an array", object)
    try:
        tensors.datatype_of(array)
    except tensors.TensorError as error:
        raise InvalidInput(
            f"input {name!r}", "a datatype of the protocol", f"numpy dtype {array.dtype}", str(error)
        ) from None
    return array


def _undeclared(inputs: Mapping[str, object], model: ModelMetadata) -> dict[str, Array]:
    if isinstance(inputs, Frame):
        raise InvalidInput(
            f"model {model.name!r}",
            "a dict of arrays, because its metadata names no inputs",
            "a data frame",
            "give the arrays by the names that the model's author chose",
        )
    return {name: array_of(name, value) for name, value in inputs.items()}


def _check_input(value: object, tensor: TensorMetadata, model_name: str) -> Array:
    subject = subject_of(tensor, model_name)
    if tensor.datatype not in tensors.DATATYPES:
        change = "the server is wrong about its model; check=False sends an array as it is"
        raise InvalidInput(subject, "a datatype of the protocol", repr(tensor.datatype), change)
    array: Array
    if type(value) is np.ndarray:
        array = value
    elif isinstance(value, (list, tuple, bool, int, float, complex, str, bytes)) and not isinstance(
        value, np.generic
    ):
        array = _from_python(value, tensor, subject)
    else:
        array = _as_array(value, subject, str(tensor))
        if array.dtype.hasobject and not array.ndim:
            raise InvalidInput(
                subject, str(tensor), f"a {type(value).__name__} that is no array", "use a numpy array"
            )
    change = _dtype_change(array, tensor.datatype)
    shape_change = _shape_change(array.shape, tensor.shape)
    if change or shape_change:
        how = f"use array{change}{shape_change}" if shape_change in ("", "[np.newaxis]") else shape_change
        raise InvalidInput(subject, str(tensor), f"{_datatype(array)} {list(array.shape)}", how)
    return array


def _from_columns(columns: Mapping[str, Array], tensor: TensorMetadata, model: ModelMetadata) -> Array:
    whole = subject_of(tensor, model.name)
    sizes = sorted({len(values) for values in columns.values()})
    if len(sizes) != 1:
        received = f"columns of {sizes[0]} and of {sizes[-1]} rows" if sizes else "no columns"
        raise InvalidInput(whole, "columns of the same length", received, "give each row all its values")
    arrays = []
    for name, values in columns.items():
        subject = f"column {name!r} for {whole}"
        if tensor.datatype == "BYTES":
            arrays.append(frames.check_strings(values, tensor, subject))
            continue
        given = values.tolist() if values.dtype == object else values
        natural = _as_array(given, subject, f"numbers for {tensor.datatype}")
        if natural.dtype.kind not in "biuf" or natural.shape != values.shape:
            change = "convert it to numbers, and fill missing values"
            raise InvalidInput(subject, f"numbers for {tensor.datatype}", f"dtype {values.dtype}", change)
        arrays.append(_exactly(_unrounded(natural, given, tensor.datatype), tensor, subject))
    array = arrays[0] if len(tensor.shape) == 1 else np.stack(arrays, axis=1)
    shape_change = _shape_change(array.shape, tensor.shape)
    if shape_change:
        raise InvalidInput(whole, str(tensor), f"columns of {len(array)} rows", shape_change)
    return array


def _dtype_change(array: Array, expected: str) -> str:
    """Return the suffix of an expression that converts the array; "" if its datatype is right."""
    if _datatype(array) == expected:
        return ""
    if expected == "BYTES":
        return ".astype(np.bytes_)"
    if expected == "BF16":
        return ".astype(ml_dtypes.bfloat16)"
    return f".astype(np.{np.dtype(tensors.datatype(expected).storage).name.replace('bool', 'bool_')})"


def _shape_change(got: tuple[int, ...], expected: tuple[int, ...]) -> str:
    if len(got) == len(expected):
        wrong = [axis for axis, size in enumerate(expected) if size >= 0 and got[axis] != size]
        if not wrong:
            return ""
        sizes = ", ".join(f"axis {axis} is {expected[axis]} long, not {got[axis]}" for axis in wrong)
        return f"reshape or pad it so that {sizes}"
    if len(got) + 1 == len(expected) and expected[0] in (-1, 1) and not _shape_change(got, expected[1:]):
        return "[np.newaxis]"
    return f"give it {len(expected)} axes, not {len(got)}"


def _datatype(array: Array) -> str:
    """Return the array's datatype, or numpy's name of a dtype that the protocol lacks."""
    try:
        return tensors.datatype_of(array)
    except tensors.TensorError:
        return f"numpy {array.dtype}"


def _as_array(value: object, subject: str, expected: str, dtype: type | None = None) -> Array:
    # Not `np.ma.is_masked`, whose import takes 18 ms.
    if isinstance(value, np.ndarray) and np.any(getattr(value, "mask", False)):
        raise InvalidInput(subject, expected, "an array with masked values", "fill them: array.filled(value)")
    try:
        return np.asarray(value, dtype)
    # A value's own __array__ may raise anything.
    except Exception as error:
        raise InvalidInput(
            subject, expected, f"a {type(value).__name__} that is no array ({error})", "use a numpy array"
        ) from None


def _from_python(value: object, tensor: TensorMetadata, subject: str) -> Array:
    if tensor.datatype == "BYTES":
        # Strings stay objects, because numpy's string dtypes drop trailing zero bytes.
        return _as_array(value, subject, str(tensor), object)
    natural = _as_array(value, subject, str(tensor))
    if natural.dtype.name == "bfloat16":
        natural = natural.astype(np.float32)
    if natural.dtype.kind not in "biuf":
        received = f"{_python_kind(natural)} {list(natural.shape)}"
        raise InvalidInput(subject, str(tensor), received, f"use numbers that {tensor.datatype} can hold")
    return _exactly(_unrounded(natural, value, tensor.datatype), tensor, subject)


def _unrounded(natural: Array, value: object, datatype: str) -> Array:
    """Return 64-bit integers exactly: numpy rounds them to float64 beside floats, or if some are above INT64."""
    if natural.dtype.kind != "f" or natural is value or datatype not in ("INT64", "UINT64"):
        return natural
    elements = np.asarray(value, object)
    try:
        exact = elements.astype(tensors.datatype(datatype).storage)
    except (ArithmeticError, TypeError, ValueError):
        return natural
    return exact if elements.tolist() == exact.tolist() else natural


def _exactly(natural: Array, tensor: TensorMetadata, subject: str) -> Array:
    """Convert numbers to the datatype of the input; raise InvalidInput if that changes one of them."""
    try:
        dtype = dtype_of(tensor.datatype)
    except tensors.TensorError as error:
        change = "install it, then call again"
        raise InvalidInput(subject, str(tensor), f"numbers; {error}", change) from None
    with np.errstate(all="ignore"):  # the comparison below finds values that do not fit
        array = natural.astype(dtype)
    if not _same_values(natural, array, tensor.datatype):
        raise InvalidInput(
            subject,
            str(tensor),
            f"values that {tensor.datatype} cannot hold exactly (numpy reads them as {natural.dtype})",
            f"round them first, or choose the loss yourself with np.array(values, dtype=np.{dtype.name})",
        )
    return array


def _same_values(natural: Array, array: Array, datatype: str) -> bool:
    if natural.dtype == array.dtype or not natural.size:
        return True
    if datatype in FLOATS and natural.dtype.kind == "f":
        return bool(np.array_equal(np.isfinite(natural), np.isfinite(array.astype(np.float64))))
    # Python compares int and float exactly; numpy would round the int first.
    back = array.astype(np.float64) if datatype == "BF16" else array
    return bool(natural.ravel().tolist() == back.ravel().tolist())


def _python_kind(array: Array) -> str:
    return {"S": "bytes", "U": "str", "c": "complex numbers"}.get(array.dtype.kind, "mixed values")
