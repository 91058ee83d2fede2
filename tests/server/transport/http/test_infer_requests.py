"""Inference requests in JSON and binary: which message each stands for, and what is refused."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import pytest

from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.transport.http.errors import HttpError
from tensorferry.server.transport.http.generate import generate_request
from tensorferry.server.transport.http.infer_requests import AnswerForm, RequestTranslator

METADATA = pb.ModelMetadataResponse(
    inputs=[pb.ModelMetadataResponse.TensorMetadata(name="x", datatype="FP32", shape=[-1, 2])]
)


def translate(
    request: Any, binary: bytes = b"", *, translator: RequestTranslator | None = None, length: int | None = -1
) -> tuple[pb.ModelInferRequest, AnswerForm]:
    head = request if isinstance(request, bytes) else json.dumps(request).encode()
    translator = translator or RequestTranslator(lambda name, version: METADATA)
    given = (len(head) if binary else None) if length == -1 else length
    data, form = translator.message(("m", "2"), head + binary, given)
    return pb.ModelInferRequest.FromString(data), form


def refusal(*arguments: Any, **options: Any) -> str:
    with pytest.raises(HttpError) as error:
        translate(*arguments, **options)
    assert error.value.status == 400
    return str(error.value)


def tensor(kind: str = "FP32", shape: Any = (2,), **fields: Any) -> dict[str, Any]:
    return {"name": "x", "datatype": kind, "shape": list(shape), **fields}


def with_input(*arguments: Any, **fields: Any) -> dict[str, Any]:
    return {"inputs": [tensor(*arguments, **fields)]}


def test_everything_of_a_request_reaches_the_message() -> None:
    message, form = translate(
        {
            "id": "one",
            "parameters": {
                "priority": 2,
                "timeout": 1 << 63,
                "binary_data_output": True,
                "z": 0.5,
                "s": "t",
                "b": False,
            },
            "inputs": [
                tensor(data=[1, 2.5]),
                {**tensor("INT64", (1,)), "name": "y", "parameters": {"binary_data_size": 8, "own": "p"}},
                {
                    **tensor("UINT8", (4,)),
                    "name": "z",
                    "parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 4},
                },
                {**tensor("BYTES", (2,)), "name": "t", "data": ["", "zwölf"]},
            ],
            "outputs": [
                {"name": "a", "parameters": {"classification": 3}},
                {"name": "b", "parameters": {"binary_data": True}},
                {"name": "c", "parameters": {"shared_memory_region": "s", "shared_memory_byte_size": 4}},
            ],
        },
        np.int64(7).tobytes(),
    )
    assert (message.model_name, message.model_version, message.id) == ("m", "2", "one")
    parameters = message.parameters
    assert set(parameters) == {"priority", "timeout", "z", "s", "b"}
    assert (parameters["priority"].int64_param, parameters["timeout"].uint64_param) == (2, 1 << 63)
    assert (parameters["z"].double_param, parameters["s"].string_param) == (0.5, "t")
    assert parameters["b"].WhichOneof("parameter_choice") == "bool_param"
    assert [(each.name, each.datatype, list(each.shape)) for each in message.inputs] == [
        ("x", "FP32", [2]), ("y", "INT64", [1]), ("z", "UINT8", [4]), ("t", "BYTES", [2]),
    ]  # fmt: skip
    assert set(message.inputs[1].parameters) == {"own"}
    assert message.inputs[2].parameters["shared_memory_region"].string_param == "r"
    assert list(message.raw_input_contents) == [
        np.array([1, 2.5], np.float32).tobytes(), np.int64(7).tobytes(), b"\0\0\0\0\6\0\0\0zw\xc3\xb6lf",
    ]  # fmt: skip
    assert [each.name for each in message.outputs] == ["a", "b", "c"]
    assert message.outputs[0].parameters["classification"].int64_param == 3
    assert form == AnswerForm(binary=frozenset("b"), shared=frozenset("c"))
    # As in Triton's code: a named output is binary only if it says so itself.
    assert [form.is_binary(name) for name in "abc"] == [False, True, False]


VALUES: dict[str, tuple[str, list[Any], Any]] = {
    "nested": ("FP32", [2, 2], [[1, 2], [3, 4]]),
    "mixed-nesting": ("FP32", [2, 2], [[1, [2]], 3, 4]),
    "scalar": ("INT32", [], 5),
    "empty": ("INT64", [0, 3], []),
    "booleans": ("BOOL", [2], [True, False]),
    "largest": ("UINT64", [2], [(1 << 64) - 1, 1]),
    "least": ("INT8", [2], [-128, 127]),
    "double": ("FP64", [1], [0.1]),
}


@pytest.mark.parametrize(("kind", "shape", "data"), VALUES.values(), ids=VALUES.keys())
def test_values_become_raw_contents(kind: str, shape: list[int], data: Any) -> None:
    message, _ = translate(with_input(kind, shape, data=data))
    dtype = {"BOOL": np.bool_, "FP32": np.float32, "FP64": np.float64}.get(kind) or np.dtype(kind.lower())
    # Whatever their nesting.
    flat = [1, 2, 3, 4] if shape == [2, 2] else data
    assert message.raw_input_contents[0] == np.array(flat, dtype).tobytes()


@pytest.mark.parametrize(
    ("kind", "shape", "data", "reason"),
    [
        ("FP32", [2], [1], "it has 1 values, but its shape \\[2\\] has 2"),
        ("FP32", [1], [True], "FP32 cannot have a boolean"),
        ("FP32", [1], [1e39], "too large for FP32"),
        ("FP64", [1], [10**400], "too large for FP64"),
        ("INT8", [1], [128], "INT8 is from -128 to 127"),
        ("INT32", [1], [1.0], "INT32 cannot have a number with a fraction"),
        ("BOOL", [1], ["true"], "BOOL cannot have a string"),
        ("BYTES", [1], [1], "BYTES cannot have an integer"),
        ("BYTES", [1], ["\ud800"], "half a surrogate pair"),
        ("FP16", [1], [1], "receiving FP16 data via JSON is not supported"),
        ("NEW", [1], [1], "receiving NEW data via JSON is not supported"),
    ],
)
def test_values_that_do_not_fit_are_refused(kind: str, shape: list[int], data: Any, reason: str) -> None:
    with pytest.raises(HttpError, match=reason) as error:
        translate(with_input(kind, shape, data=data))
    assert error.value.status == 400


def test_nesting_is_bounded() -> None:
    assert "more than 100 lists are nested" in refusal(
        with_input(shape=[1], data=json.loads("[" * 150 + "1" + "]" * 150))
    )
    assert "failed to parse" in refusal(b"[" * 100_000)
    deep: Any = json.loads("[" * 99 + "1" + "]" * 99)
    began = time.process_time()
    translate(with_input("INT64", [1_000_000], data=[*[0] * 999_999, deep]))
    # Once for each level it took 10 s and more.
    assert time.process_time() - began < 5


def test_what_takes_long_to_read_is_refused_before() -> None:
    assert "more than 1048576 values" in refusal(b'{"inputs":[' + b"[]," * (1 << 20) + b"0]}")
    began = time.process_time()
    # The product of the dimensions took hours.
    assert "has 200000 dimensions" in refusal(with_input("INT64", [1 << 62] * 200_000, data=[1]))
    assert time.process_time() - began < 5


MALFORMED: dict[str, tuple[Any, str]] = {
    "no-json": (b"{", "failed to parse the request JSON buffer"),
    "list": ([], "must be a JSON object"),
    "no-inputs": ({}, "Unable to parse 'inputs'"),
    "inputs-object": ({"inputs": {}}, "Unable to parse 'inputs'"),
    "input-text": ({"inputs": ["x"]}, "Unable to parse 'inputs'"),
    "no-name": ({"inputs": [{"datatype": "FP32", "shape": [1], "data": [1]}]}, "no string 'name'"),
    "no-shape": ({"inputs": [{"name": "x", "datatype": "FP32", "data": [1]}]}, "'shape' must be a list"),
    "shape-sign": (with_input(shape=[-1], data=[1]), "'shape' must be a list"),
    "shape-bool": (with_input(shape=[True], data=[1]), "'shape' must be a list"),
    "no-source": (with_input(), "But no field is set"),
    "two-sources": (with_input(data=[1, 2], parameters={"binary_data_size": 8}), "But multiple fields are set"),
    "size-text": (with_input(parameters={"binary_data_size": "8"}), "must be a number of bytes"),
    "id": ({"id": 1, "inputs": []}, "'id' is 1; it must be a string"),
    "parameter": ({"parameters": {"p": [1]}, "inputs": []}, "parameter 'p' has invalid type"),
    "parameters": ({"parameters": [], "inputs": []}, "'parameters' must be a JSON object"),
    "binary-flag": ({"parameters": {"binary_data_output": 1}, "inputs": []}, "'binary_data_output' is 1"),
    "output-name": ({"inputs": [], "outputs": [{}]}, "no string 'name'"),
    "output-shared-binary": (
        {"inputs": [], "outputs": [{"name": "y", "parameters": {"shared_memory_region": "r", "binary_data": True}}]},
        "can't be set for the same output",
    ),
    "output-shared-classes": (
        {"inputs": [], "outputs": [{"name": "y", "parameters": {"shared_memory_region": "r", "classification": 1}}]},
        "can't be used for classification",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("request_json", "reason"), MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_requests_are_refused(request_json: Any, reason: str) -> None:
    assert reason in refusal(request_json)


def test_the_binary_part_must_have_the_announced_bytes() -> None:
    request = with_input(parameters={"binary_data_size": 8})
    assert "unexpected additional input data: 1 bytes" in refusal(request, b"123456789")
    assert "expecting 3 additional bytes" in refusal(request, b"12345")
    assert "expecting 8 additional bytes" in refusal(request)
    assert "the body has only" in refusal(request, b"12345678", length=10_000)


def test_equal_heads_are_parsed_once_whatever_their_ids() -> None:
    translator = RequestTranslator(lambda name, version: METADATA)
    for number in range(3):
        for separator in (",", ", "):
            fields = {"id": f"r{number}", **with_input(parameters={"binary_data_size": 8})}
            head = json.dumps(fields, separators=(separator, ":")).encode()
            message, _ = translate(head, bytes([number] * 8), translator=translator)
            assert (message.id, message.raw_input_contents[0]) == (f"r{number}", bytes([number] * 8))
    assert len(translator._plans) == 2
    # Data in JSON is not kept, nor is an id that another request could get.
    translate(with_input(data=[1, 2]), translator=translator)
    late = {**with_input(parameters={"binary_data_size": 8}), "id": "late"}
    assert translate(late, bytes(8), translator=translator)[0].id == "late"
    assert len(translator._plans) == 2


def test_a_body_of_one_tensor_alone() -> None:
    body = np.arange(2, dtype=np.float32).tobytes()
    message, form = translate(body, length=0)
    assert (list(message.inputs[0].shape), message.raw_input_contents[0]) == ([1, 2], body)
    assert form.is_binary("any")
    assert "cannot have 12 bytes" in refusal(bytes(12), length=0)
    two = pb.ModelMetadataResponse(inputs=[METADATA.inputs[0], METADATA.inputs[0]])
    assert "has 2: send a JSON head" in refusal(
        body, length=0, translator=RequestTranslator(lambda name, version: two)
    )
    lengths = pb.ModelMetadataResponse(
        inputs=[pb.ModelMetadataResponse.TensorMetadata(name="x", datatype="INT64", shape=[-1, -1])]
    )
    message, _ = translate(bytes(24), length=0, translator=RequestTranslator(lambda name, version: lengths))
    assert list(message.inputs[0].shape) == [1, 3]


@pytest.mark.parametrize(
    ("value", "shape"), [(1, [1, 1]), ([1, 2], [1, 2]), ([[1, 2], [3, 4]], [2, 2]), ([[], []], [2, 0])]
)
def test_inputs_of_generate_have_the_shape_of_their_lists(value: Any, shape: list[int]) -> None:
    data = generate_request(lambda name, version: METADATA, ("m", ""), json.dumps({"x": value}).encode())
    assert list(pb.ModelInferRequest.FromString(data).inputs[0].shape) == shape


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ([[1], [2, 3], []], "lists of 0 to 2 values in dimension 1"),
        ([1, [2]], "both lists and values in dimension 1"),
        ([[[1]], [[2, 3]]], "lists of 1 to 2 values in dimension 2"),
    ],
)
def test_generate_refuses_lists_that_are_no_tensor(value: Any, found: str) -> None:
    with pytest.raises(HttpError, match=f"input 'x' has {found}; all must be lists of the same") as error:
        generate_request(lambda name, version: METADATA, ("m", ""), json.dumps({"x": value}).encode())
    assert error.value.status == 400
