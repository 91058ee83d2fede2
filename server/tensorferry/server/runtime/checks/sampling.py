"""Random inputs for a model, and comparison of its outputs up to rounding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tensorferry.protos.tensors import Datatype
from tensorferry.server.signature import Signature, TensorSpec

Array = npt.NDArray[Any]
Run = Callable[[Mapping[str, Array]], Mapping[str, Array]]

# Sizes tried for varying dimensions other than the batch axis. A model may need a minimum, or a multiple of a size.
_SIZES = (4, 16, 64, 224, 1)
# Allowed difference, relative to the output's greatest magnitude. It covers another order of summation, but no
# different result.
TOLERANCE = {"FP16": 1e-2, "BF16": 5e-2, "FP32": 1e-4, "FP64": 1e-9}


def random_inputs(
    signature: Signature, rows: int, size: int, seed: int = 0, sizes: Mapping[str, int] | None = None
) -> dict[str, Array]:
    """Return random inputs with `rows` rows. Other varying dimensions have the size in `sizes`, or else `size`.

    Floats are standard normal. Integers and strings are 0 or 1, which are valid as indices, masks and categories.
    """
    generator = np.random.default_rng(seed)
    arrays = {}
    for spec in signature.inputs:
        shape = tuple(dim if isinstance(dim, int) else (sizes or {}).get(dim, size) for dim in spec.dims)
        if spec.dims and not isinstance(spec.dims[0], int):
            shape = (rows, *shape[1:])
        arrays[spec.name] = random_array(spec, shape, generator)
    return arrays


def random_array(spec: TensorSpec, shape: tuple[int, ...], generator: np.random.Generator) -> Array:
    """Return random values for a tensor, as in `random_inputs`."""
    name, storage = spec.datatype.name, spec.datatype.storage
    if name == "BYTES":
        # `asarray`, because the integers of a scalar's shape are no array.
        return np.asarray(generator.integers(0, 2, shape)).astype("S" if spec.binary else "U").astype(object)
    if spec.is_float:
        return array_of_floats(generator.standard_normal(shape), spec.datatype)
    if name == "UINT8":
        return generator.integers(0, 256, shape).astype(storage)
    return generator.integers(0, 2, shape).astype(storage)


def working_size(
    signature: Signature, run: Run, sizes: Mapping[str, int] | None = None
) -> tuple[int | None, str]:
    """Return a size of the varying dimensions with which the model runs, else None and the reason.

    Dimensions in `sizes` have these, as in `random_inputs`.
    """
    reason = ""
    for size in _SIZES if varies(signature) else _SIZES[:1]:
        try:
            run(random_inputs(signature, 1, size, sizes=sizes))
        except Exception as error:
            reason = reason or str(error)
        else:
            return size, ""
    return None, reason


def varies(signature: Signature) -> bool:
    """Return whether an input has a varying dimension other than the batch axis."""
    return any(
        spec.any_rank or any(not isinstance(dim, int) for dim in spec.dims[1:]) for spec in signature.inputs
    )


def describe_difference(
    spec: TensorSpec,
    expected: Array,
    got: Array,
    precision: float = 0.0,
    *,
    least_scale: float = 1e-6,
    noise: float = 0.0,
) -> str:
    """Describe how `got` differs from `expected`; "" if they are equal up to rounding.

    The tolerance is the datatype's or `precision`, whichever is greater. It is relative to the greatest magnitude of
    `expected`, or to `least_scale` if that is greater. `noise` is an absolute allowance.
    """
    if expected.shape != got.shape:
        return f"shape {list(got.shape)} instead of {list(expected.shape)}"
    if not spec.is_float:
        wrong = int(np.count_nonzero(expected != got))
        return f"{wrong} of {expected.size} values differ" if wrong else ""
    found = greatest_difference(spec, expected, got)
    if found is None:
        return "infinities or NaNs are at different positions"
    worst, scale = found[0], max(found[1], least_scale)
    if worst <= max(TOLERANCE[spec.datatype.name], precision) * scale + noise:
        return ""
    return f"by {worst:.3g}, its values reach {scale:.3g}"


def greatest_difference(spec: TensorSpec, expected: Array, got: Array) -> tuple[float, float] | None:
    """Return the greatest difference of floats of one shape, and the greatest magnitude of `expected`.

    Both are of finite values, 0 without any. None if infinities or NaNs are at different positions.
    """
    a, b = (as_float64(array, spec) for array in (expected, got))
    finite = np.isfinite(a) & np.isfinite(b)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return None
    a, b = a[finite], b[finite]
    return float(np.abs(a - b).max(initial=0.0)), float(np.abs(a).max(initial=0.0))


def as_float64(array: Array, spec: TensorSpec) -> Array:
    """Return the values of a tensor of floats, including BF16, as float64."""
    if spec.datatype.name == "BF16":
        return (array.astype("<u4") << 16).view("<f4").astype("<f8")
    return array.astype("<f8")


def array_of_floats(numbers: npt.ArrayLike, datatype: Datatype) -> Array:
    """Return numbers as a tensor of floats. BF16 is truncated; the highest bit of a NaN is kept."""
    if datatype.name != "BF16":
        return np.asarray(numbers, datatype.storage)
    # `asarray`, because operators on a 0-d array return a scalar.
    return np.asarray(np.asarray(numbers, "<f4").view("<u4") >> 16, "<u2")
