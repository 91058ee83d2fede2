"""Requests are compared with the model's metadata before they are sent."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from client.scripted import ScriptedServer, ScriptedServicer

from tensorferry.client import InferenceClient, InvalidInput, ModelMetadata, TensorMetadata
from tensorferry.client.messages.checks import check_inputs


def model(datatype: str, *shape: int) -> ModelMetadata:
    tensors = (TensorMetadata("x", datatype, shape),)
    return ModelMetadata("m", ("1",), "", tensors, tensors)


@pytest.mark.parametrize(
    ("datatype", "shape", "value", "text"),
    [
        (
            "UINT8",
            (-1, 8, 8),
            np.ones((8, 8), np.float32),
            "input 'x' of model 'm' expects UINT8 [-1, 8, 8], got FP32 [8, 8]:"
            " use array.astype(np.uint8)[np.newaxis]",
        ),
        ("FP32", (-1,), np.ones(3), "expects FP32 [-1], got FP64 [3]: use array.astype(np.float32)"),
        ("BOOL", (-1,), np.ones(3), "use array.astype(np.bool_)"),
        ("BF16", (-1,), np.ones(3), "use array.astype(ml_dtypes.bfloat16)"),
        ("FP32", (-1,), np.ones(3, np.complex64), "got numpy complex64 [3]: use array.astype(np.float32)"),
        ("FP32", (-1,), np.array([1, "a"], object), "got BYTES [2]: use array.astype(np.float32)"),
        ("FP32", (-1, 3), np.ones(3, np.float32), "got FP32 [3]: use array[np.newaxis]"),
        ("FP32", (-1, 3), np.ones((2, 4), np.float32), "got FP32 [2, 4]: reshape or pad it so that axis 1 is 3 long, not 4"),
        ("FP32", (-1, 3), np.ones((1, 1, 3), np.float32), "give it 2 axes, not 3"),
        ("INT64", (), np.ones(1, np.int64), "expects INT64 [], got INT64 [1]: give it 0 axes, not 1"),
        ("INT64", (-1,), [[1], [1, 2]], "a list that is no array"),
        ("INT64", (-1,), ["1"], "expects INT64 [-1], got str [1]: use numbers that INT64 can hold"),
        ("INT64", (-1,), [1.5], "values that INT64 cannot hold exactly (numpy reads them as float64)"),
        ("INT64", (-1,), [2**63], "cannot hold exactly"),
        ("UINT8", (-1,), [256], "np.array(values, dtype=np.uint8)"),
        ("BOOL", (-1,), [2], "cannot hold exactly"),
        ("UINT64", (-1,), [2**63 + 1, 0.5], "cannot hold exactly"),
        ("FP32", (-1,), [2**24 + 1], "cannot hold exactly"),
        ("FP16", (-1,), [1e6], "cannot hold exactly"),
        ("FP32", (-1,), [1j], "got complex numbers [1]"),
        ("FP32", (-1,), None, "a NoneType that is no array"),
        ("FP32", (-1,), np.ma.masked_equal(np.ones(2, np.float32), 1), "an array with masked values: fill them"),
    ],
)  # fmt: skip
def test_a_misfit_says_expected_received_and_change(
    datatype: str, shape: tuple[int, ...], value: object, text: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_inputs({"x": value}, model(datatype, *shape))
    assert text in str(caught.value)
    assert caught.value.subject == "input 'x' of model 'm'"


@pytest.mark.parametrize(
    ("datatype", "value", "expected"),
    [
        ("FP32", [0.1, float("inf")], np.array([0.1, np.inf], np.float32)),
        ("FP16", (1, 2), np.array([1, 2], np.float16)),
        ("BF16", [0.1, 2.5], np.array([0.1, 2.5], ml_dtypes.bfloat16)),
        ("BF16", [ml_dtypes.bfloat16(2.5)], np.array([2.5], ml_dtypes.bfloat16)),
        ("INT8", [ml_dtypes.bfloat16(2)], np.array([2], np.int8)),
        ("FP64", [2**60, 1], np.array([2.0**60, 1])),
        ("INT8", [-128, 127], np.array([-128, 127], np.int8)),
        ("INT64", [1.0, 2.0], np.array([1, 2], np.int64)),
        ("INT64", [2**53 + 1, 1.0], np.array([2**53 + 1, 1], np.int64)),
        ("UINT64", [np.uint64(2**63 + 1), np.int64(1)], np.array([2**63 + 1, 1], np.uint64)),
        ("UINT64", [2**64 - 1, 2**63], np.array([2**64 - 1, 2**63], np.uint64)),
        ("BOOL", [True, 0], np.array([True, False])),
        ("INT32", [True, False], np.array([1, 0], np.int32)),
        ("INT32", [], np.array([], np.int32)),
        ("BYTES", ["a", b"b\0"], np.array(["a", b"b\0"], object)),
    ],
)
def test_python_values_become_the_models_datatype(
    datatype: str, value: object, expected: np.typing.NDArray[np.generic]
) -> None:
    array = check_inputs({"x": value}, model(datatype, -1))["x"]
    assert array.dtype == expected.dtype
    np.testing.assert_array_equal(array, expected)


def test_python_scalars_become_scalars() -> None:
    assert check_inputs({"x": 3}, model("INT32"))["x"].shape == ()
    assert check_inputs({"x": "text"}, model("BYTES"))["x"].tolist() == "text"
    with pytest.raises(InvalidInput, match="got FP64"):
        check_inputs({"x": np.float64(3)}, model("FP32"))


def test_arrays_are_not_copied() -> None:
    array = np.ones(3, np.float32)
    assert check_inputs({"x": array}, model("FP32", -1))["x"] is array


def test_inputs_go_in_the_order_of_the_model() -> None:
    tensors = tuple(TensorMetadata(name, "INT64", (1,)) for name in "ba")
    assert list(check_inputs({"a": [1], "b": [2]}, ModelMetadata("m", (), "", tensors, ()))) == ["b", "a"]


def test_names_are_checked(servicer: ScriptedServicer, client: InferenceClient) -> None:
    with pytest.raises(InvalidInput) as caught:
        client.infer("text", {"words": ["a"], "w": [[1, 2]]}, request_id="r1")
    assert str(caught.value) == (
        "model 'text' expects the inputs 'words', 'weights', got 'words', 'w': add 'weights' and remove 'w' (request 'r1')"
    )
    assert caught.value.request_id == "r1"
    with pytest.raises(InvalidInput, match="outputs out of 'image', got 'label': remove 'label'"):
        client.infer("digits", {"image": np.ones((1, 8, 8), np.uint8)}, outputs=["label"])
    assert set(servicer.calls) == {"ModelMetadata"}


@pytest.mark.parametrize("checked", [True, False])
def test_elements_of_bytes_are_checked(server: ScriptedServer, checked: bool) -> None:
    words = np.array(["a", 1], object)
    with (
        InferenceClient(server.target, check=checked) as client,
        pytest.raises(InvalidInput, match="must be bytes or str, got int"),
    ):
        client.infer("text", {"words": words, "weights": [[1, 2]]})
