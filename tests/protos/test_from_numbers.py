"""Numbers that are no arrays become arrays of a datatype, if that can hold them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tensorferry.protos.tensors import TensorError, datatype, from_numbers


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("UINT8", [0, 255], [0, 255]),
        ("UINT64", [1, 2**64 - 1], [1, 2**64 - 1]),
        ("UINT64", [np.uint64(2**63), np.int64(1)], [2**63, 1]),
        ("INT32", np.arange(3), [0, 1, 2]),
        ("INT64", [True, 2], [1, 2]),
        ("INT64", [], []),
        ("BOOL", [True, False], [True, False]),
        ("FP32", 0.1, np.float32(0.1)),
        ("FP32", [1, 2.5], [1, 2.5]),
        ("FP16", [float("inf")], [float("inf")]),
    ],
)
def test_numbers_that_a_datatype_can_hold(name: str, value: Any, expected: Any) -> None:
    array = from_numbers(value, datatype(name))
    assert array.dtype == datatype(name).storage
    assert array.tolist() == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("INT32", [1.0]),
        ("INT32", np.float64(1.7)),
        ("UINT8", [256]),
        ("UINT64", [-1]),
        ("UINT64", [-1, 2**63]),
        ("INT64", [2**63]),
        ("INT64", [2**64]),
        ("INT64", ["1"]),
        ("INT64", [None]),
        ("INT64", [[1], [1, 2]]),
        ("BOOL", [1]),
        ("FP32", [1e39]),
        ("FP16", [70000]),
        ("FP32", ["1"]),
        ("FP32", [1j]),
        ("BF16", [1.5]),
        ("BF16", [1]),
    ],
)
def test_numbers_that_a_datatype_cannot_hold(name: str, value: Any) -> None:
    with pytest.raises(TensorError):
        from_numbers(value, datatype(name))
