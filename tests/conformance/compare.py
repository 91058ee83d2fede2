"""Comparison of tensors with the expectation of a case."""

from __future__ import annotations

import numpy as np
from conformance.cases import Array, Case, Value

# bfloat16 has eight bits: at least two units in the last place, whatever the case's tolerance.
_LEAST_RTOL_OF_BFLOAT16 = 2.0**-6


def difference(case: Case, name: str, expected: Value, got: Array) -> str:
    """Return how an output differs from the expectation, also in dtype and shape; "" if it does not."""
    if not isinstance(expected, np.ndarray):
        return f"output {name!r} should be {expected!r}, not a tensor"
    if got.dtype != expected.dtype:
        return f"output {name!r} is of dtype {got.dtype}, expected {expected.dtype}"
    if got.shape != expected.shape:
        return f"output {name!r} has shape {list(got.shape)}, expected {list(expected.shape)}"
    rtol = case.rtol
    if expected.dtype.name == "bfloat16":
        rtol = max(rtol, _LEAST_RTOL_OF_BFLOAT16)
        expected, got = expected.astype(np.float32), got.astype(np.float32)
    try:
        if expected.dtype == object:
            np.testing.assert_array_equal(got, expected)
        else:
            np.testing.assert_allclose(got, expected, rtol=rtol, atol=case.atol)
    except AssertionError as error:
        return f"output {name!r}: {' '.join(str(error).split())[:300]}"
    return ""
