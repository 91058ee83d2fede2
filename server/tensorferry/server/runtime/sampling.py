"""Random inputs of a model, and the comparison of its outputs but for rounding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tensorferry.protos.tensors import Datatype
from tensorferry.server.signature import Signature, TensorSpec

Array = npt.NDArray[Any]
Run = Callable[[Mapping[str, Array]], Mapping[str, Array]]

# Sizes tried for dimensions that vary besides the batch axis: a model may need a least size,
# or a multiple of one.
_SIZES = (4, 16, 64, 224, 1)
# Allowed difference, relative to the greatest magnitude of the output: room for another order
# of summation, not for another answer.
TOLERANCE = {"FP16": 1e-2, "BF16": 5e-2, "FP32": 1e-4, "FP64": 1e-9}


def random_inputs(
    signature: Signature, rows: int, size: int, seed: int = 0, sizes: Mapping[str, int] | None = None
) -> dict[str, Array]:
    """Random inputs: `rows` rows, and `size` for every other dimension that varies, but for those named in `sizes`.

    Floats are standard normal, integers and strings 0 or 1: values that indices, masks and
    categories all admit.
    """
    generator = np.random.default_rng(seed)
    return {spec.name: _random(spec, rows, size, sizes or {}, generator) for spec in signature.inputs}


def _random(
    spec: TensorSpec, rows: int, size: int, sizes: Mapping[str, int], generator: np.random.Generator
) -> Array:
    shape = tuple(dim if isinstance(dim, int) else sizes.get(dim, size) for dim in spec.dims)
    if spec.dims and not isinstance(spec.dims[0], int):
        shape = (rows, *shape[1:])
    return random_array(spec.datatype, shape, generator)


def random_array(datatype: Datatype, shape: tuple[int, ...], generator: np.random.Generator) -> Array:
    """Random values of a datatype, as `random_inputs` has them."""
    name, storage = datatype.name, datatype.storage
    if name == "BYTES":
        return generator.integers(0, 2, shape).astype(str).astype(object)
    if name == "BF16":
        bits = generator.standard_normal(shape).astype("<f4").view("<u4") >> 16
        return np.asarray(bits, "<u2")  # of a scalar, what operators return is no array
    if storage.kind == "f":
        return generator.standard_normal(shape).astype(storage)
    if name == "UINT8":
        return generator.integers(0, 256, shape).astype(storage)
    return generator.integers(0, 2, shape).astype(storage)


def working_size(signature: Signature, run: Run) -> tuple[int | None, str]:
    """A size of the varying dimensions with which the model runs, or None and why it does not."""
    reason = ""
    for size in _SIZES if varies(signature) else _SIZES[:1]:
        try:
            run(random_inputs(signature, 1, size))
        except Exception as error:
            reason = reason or str(error)
        else:
            return size, ""
    return None, reason


def varies(signature: Signature) -> bool:
    """Whether an input has a dimension that varies besides the batch axis."""
    return any(
        spec.any_rank or any(not isinstance(dim, int) for dim in spec.dims[1:]) for spec in signature.inputs
    )


def describe_difference(spec: TensorSpec, expected: Array, got: Array, precision: float = 0.0) -> str:
    """In what `got` is another answer than `expected`; "" when it is the same but for rounding.

    Rounding is that of the datatype, or, if that is coarser, to `precision`.
    """
    if expected.shape != got.shape:
        return f"shape {list(got.shape)} instead of {list(expected.shape)}"
    tolerance = TOLERANCE.get(spec.datatype.name)
    if tolerance is None:
        wrong = int(np.count_nonzero(expected != got))
        return f"{wrong} of {expected.size} values are others" if wrong else ""
    tolerance = max(tolerance, precision)
    a, b = (as_float64(array, spec) for array in (expected, got))
    finite = np.isfinite(a) & np.isfinite(b)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return "infinities or NaNs stand elsewhere"
    if not finite.any():
        return ""
    scale = max(float(np.abs(a[finite]).max()), 1e-6)
    worst = float(np.abs(a[finite] - b[finite]).max())
    return f"by {worst:.3g}, its values reach {scale:.3g}" if worst > tolerance * scale else ""


def as_float64(array: Array, spec: TensorSpec) -> Array:
    """The numbers in a tensor of floats, BF16 among them."""
    if spec.datatype.name == "BF16":
        return (array.astype("<u4") << 16).view("<f4").astype("<f8")
    return array.astype("<f8")
