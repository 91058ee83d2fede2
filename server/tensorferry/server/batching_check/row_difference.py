"""The comparison of one row's output with the same row's in another batch."""

from __future__ import annotations

import numpy as np

from tensorferry.server.batching_check.row_kinds import is_float
from tensorferry.server.runtime.sampling import TOLERANCE, Array, as_float64
from tensorferry.server.signature import TensorSpec

# Room for numbers that vary from run to run, as multiples of the variation that was seen.
_NOISE = 8.0


def row_difference(spec: TensorSpec, first: Array, again: Array, other: Array) -> str:
    """How a row's output depends on its neighbours; "" when it does not.

    All three are outputs of the row at one place in batches of one size: `first` and `again` of the same batch,
    `other` beside other neighbours. The kernels are the same, so that rounding explains almost nothing. What is
    allowed is relative to this row's own magnitude, not to that of the batch.
    """
    if first.shape != other.shape:
        return f"shape {list(other.shape)} instead of {list(first.shape)}"
    if not is_float(spec):
        wrong = int(np.count_nonzero(first != other))
        return f"{wrong} of {first.size} values are others" if wrong else ""
    if np.array_equal(first, other):
        return ""
    a, b, c = (as_float64(array, spec) for array in (first, other, again))
    finite = np.isfinite(a) & np.isfinite(b)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return "infinities or NaNs stand elsewhere"
    if not finite.any():
        return ""
    scale = float(np.abs(a[finite]).max())
    worst = float(np.abs(a[finite] - b[finite]).max())
    steady = finite & np.isfinite(c)
    noise = float(np.abs(a[steady] - c[steady]).max()) if steady.any() else 0.0
    if worst <= TOLERANCE[spec.datatype.name] * scale + _NOISE * noise:
        return ""
    return f"by {worst:.3g}, its values reach {scale:.3g}"
