"""Values of `tensorferry infer`, converted to the datatypes of a model."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tensorferry.client import InvalidInput, TensorMetadata
from tensorferry.client.cli.values import array_of


@pytest.mark.parametrize(
    ("value", "datatype", "shape", "expected"),
    [
        ([1, 2], "INT8", [-1], [1, 2]),
        ([2**63 + 1, 1], "UINT64", [-1], [2**63 + 1, 1]),
        ([0.5, 1, "-Infinity"], "FP16", [-1], [0.5, 1, -np.inf]),
        (16777217, "FP32", [], 16777216),
        ([0.5, -2], "BF16", [2], [0.5, -2]),
        ([True, 0, 1.0], "BOOL", [-1], [True, False, True]),
        ("é", "BYTES", [1], ["é".encode()]),
        (b"\0", "BYTES", [-1, 1], [[b"\0"]]),
        ([[["a"]]], "BYTES", [1, -1, 1], [[[b"a"]]]),
        # Missing leading axes.
        (3, "INT32", [-1, 1], [[3]]),
        ([1, 2], "INT32", [-1, 2], [[1, 2]]),
        # Without elements, the axes behind come from the model.
        ([], "INT32", [-1, 3], np.empty((0, 3)).tolist()),
        ([[], []], "INT32", [-1, -1], [[], []]),
        # Arrays.
        (np.array([1.5], np.float64), "FP32", [-1], [1.5]),
        (np.array([1.5], ml_dtypes.bfloat16), "FP64", [-1], [1.5]),
        (np.array([3.0]), "INT16", [-1], [3]),
        (np.array([[1, 2]], ">i4"), "INT32", [-1, 2], [[1, 2]]),
        (np.array(["a"]), "BYTES", [-1], ["a"]),
    ],
)
def test_a_value_that_fits(value: object, datatype: str, shape: list[int], expected: object) -> None:
    array = array_of(value, TensorMetadata("x", datatype, tuple(shape)), "m")
    assert array.tolist() == expected
    assert len(array.shape) == len(shape)


@pytest.mark.parametrize(
    ("value", "datatype", "shape", "text"),
    [
        ([1, 300], "INT8", [-1], "got 300 of type int at [1]: INT8 holds -128 to 127"),
        ([[1, 2.5]], "INT8", [-1, 2], "got 2.5 of type float at [0, 1]: write integers; round it first"),
        (float("inf"), "INT8", [], "write integers"),
        (["1"], "INT8", [-1], "got '1' of type str at [0]: write integers"),
        ([None], "FP32", [-1], "got None of type NoneType at [0]: write numbers"),
        ([0.5, 1e6], "FP16", [-1], "got 1000000.0 of type float at [1]: FP16 has no number that large"),
        ([10**400], "FP64", [-1], "write numbers that a float can hold"),
        (["true"], "BOOL", [-1], "got 'true' of type str at [0]: write true or false"),
        ([2], "BOOL", [-1], "write true or false"),
        ([1], "BYTES", [-1], "write strings in quotes"),
        ([{"b64": "*"}], "BYTES", [-1], '"b64" is no base64'),
        (["\ud800"], "BYTES", [-1], "lone surrogates"),
        ([[1, 2], [3]], "INT8", [-1, 2], "got lists of 1 and of 2 elements side by side: give all lists"),
        ([[1], 2], "INT8", [-1, 2], "got a list and single values side by side"),
        ([1, 2, 3], "INT8", [-1, 2], "got the shape [3]: axis 1 must be 2 long, not 3"),
        ([[1]], "INT8", [-1], "got the shape [1, 1]: give it 1 axes, not 2"),
        (np.array([1j]), "FP32", [-1], "got an array of numpy's complex128"),
        (np.array([1e39]), "FP32", [-1], "FP32 has no number that large"),
        ([1], "INT7", [-1], "'INT7' is not one of"),
    ],
)
def test_a_value_that_does_not_fit(value: object, datatype: str, shape: list[int], text: str) -> None:
    tensor = TensorMetadata("x", datatype, tuple(shape))
    with pytest.raises(InvalidInput) as caught:
        array_of(value, tensor, "m")
    assert str(caught.value).startswith(f"input 'x' of model 'm' expects {tensor}, got ")
    assert text in str(caught.value)


def test_a_stated_shape_arranges_the_elements() -> None:
    tensor = TensorMetadata("x", "INT64", (-1, 2))
    assert array_of([1, 2, 3, 4], tensor, "m", [2, 2]).tolist() == [[1, 2], [3, 4]]
    with pytest.raises(
        InvalidInput, match=r"2 elements of shape \[2\] for the shape \[2, 2\]: give 4 elements"
    ):
        array_of([1, 2], tensor, "m", [2, 2])
    with pytest.raises(InvalidInput, match=r"got the shape \[2\]: give it 2 axes, not 1"):
        array_of([1, 2], tensor, "m", [2])
