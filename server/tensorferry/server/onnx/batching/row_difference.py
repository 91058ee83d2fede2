"""Comparison of one row's output in two batches."""

from __future__ import annotations

import numpy as np

from tensorferry.server.runtime.checks.sampling import Array, as_float64, describe_difference
from tensorferry.server.signature import TensorSpec

# Allowance for outputs that vary from run to run, as a multiple of the observed variation.
_NOISE = 8.0


def row_difference(spec: TensorSpec, first: Array, again: Array, other: Array) -> str:
    """Return how a row's output depends on the other rows; "" if it does not.

    All three are outputs of the row at the same position in batches of one size: `first` and `again` of the same batch,
    `other` with different neighbours. The kernels are the same, so rounding explains almost no difference. The tolerance
    is relative to this row's magnitude, not to that of the batch.
    """
    if np.array_equal(first, other):
        return ""
    noise = 0.0
    if spec.is_float and first.shape == again.shape:
        a, b = (as_float64(array, spec) for array in (first, again))
        finite = np.isfinite(a) & np.isfinite(b)
        noise = float(np.abs(a[finite] - b[finite]).max()) if finite.any() else 0.0
    return describe_difference(spec, first, other, least_scale=0.0, noise=_NOISE * noise)
