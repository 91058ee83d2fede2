"""Comparison of one row's output in two batches."""

from __future__ import annotations

import numpy as np

from tensorferry.server.batching_check.row_kinds import is_float
from tensorferry.server.runtime.sampling import TOLERANCE, Array, as_float64
from tensorferry.server.signature import TensorSpec

# Allowance for outputs that vary from run to run, as a multiple of the observed variation.
_NOISE = 8.0


def row_difference(spec: TensorSpec, first: Array, again: Array, other: Array) -> str:
    """Return how a row's output depends on the other rows; "" if it does not.

    All three are outputs of the row at the same position in batches of one size: `first` and `again` of the same batch,
    `other` with different neighbours. The kernels are the same, so rounding explains almost no difference. The tolerance
    is relative to this row's magnitude, not to that of the batch.
    """
    if first.shape != other.shape:
        return f"shape {list(other.shape)} instead of {list(first.shape)}"
    if not is_float(spec):
        wrong = int(np.count_nonzero(first != other))
        return f"{wrong} of {first.size} values differ" if wrong else ""
    if np.array_equal(first, other):
        return ""
    a, b, c = (as_float64(array, spec) for array in (first, other, again))
    finite = np.isfinite(a) & np.isfinite(b)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return "infinities or NaNs are at different positions"
    if not finite.any():
        return ""
    scale = float(np.abs(a[finite]).max())
    worst = float(np.abs(a[finite] - b[finite]).max())
    steady = finite & np.isfinite(c)
    noise = float(np.abs(a[steady] - c[steady]).max()) if steady.any() else 0.0
    if worst <= TOLERANCE[spec.datatype.name] * scale + _NOISE * noise:
        return ""
    return f"by {worst:.3g}, its values reach {scale:.3g}"
