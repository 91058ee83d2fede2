"""Requests are checked against the model's signature, and errors say what does not fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from google.protobuf import json_format
from support.server.rig import fp32, request, signature, spec

from tensorferry.batcher import RequestTooLarge
from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos.tensors import TensorError
from tensorferry.server.config.limits import RequestLimits
from tensorferry.server.errors import InvalidRequestError
from tensorferry.server.inference.requests.codec import DecodedRequest, RequestedOutput, decode_request
from tensorferry.server.inference.shared_memory.regions import RegionLease, Regions
from tensorferry.server.signature import Signature, TensorSpec

B = spec("s", "BYTES", "batch", "k", binary=True)
X, N, S = spec("x", "FP32", "batch", 3), spec("n", "INT64", "batch"), spec("s", "BYTES", "batch", "k")
TEXTS = signature(spec("s", "BYTES", "batch"))
E_ACUTE = "\N{LATIN SMALL LETTER E WITH ACUTE}"
MODEL = signature(X, N, outputs=(spec("y", "FP32", "batch", 3), spec("z", "INT64", "batch")))


def good(rows: int = 2, *, typed: bool = False) -> pb.ModelInferRequest:
    return request({"x": fp32(rows, 3), "n": np.arange(rows)}, typed=typed)


def decoded(message: pb.ModelInferRequest, made: Any = MODEL, *, batched: bool = True) -> DecodedRequest:
    return decode_request(message, "m", made, batched, RegionLease(Regions()))


def refused(message: pb.ModelInferRequest, made: Any = MODEL, *, batched: bool = True) -> str:
    with pytest.raises((InvalidRequestError, TensorError)) as caught:
        decoded(message, made, batched=batched)
    return str(caught.value)


def test_tensors_are_in_the_models_order() -> None:
    message = request({"n": np.array([5, 6]), "x": fp32(2, 3)})
    for x, n in (decoded(message).tensors, decoded(good()).tensors):
        assert (x.shape, x.dtype, x.data) == ((2, 3), np.dtype("<f4"), fp32(2, 3).tobytes())
        assert n.shape == (2,)
    assert decoded(message).tensors[1].data == np.array([5, 6]).tobytes()


def test_rows_are_axis_0_of_a_batched_model_and_1_of_another() -> None:
    assert decoded(good(5)).rows == 5
    assert decoded(good(0)).rows == 0
    assert decoded(good(5), batched=False).rows == 1


def test_requests_that_differ_in_rows_only_have_one_key() -> None:
    texts = signature(S)

    def key(*shape: int) -> Any:
        return decoded(request({"s": np.full(shape, b"t", dtype=object)}), texts).key

    assert key(1, 2) == key(7, 2)
    assert key(1, 2) != key(1, 3)
    assert decoded(good(1)).key == decoded(good(1, typed=True)).key


def test_more_rows_than_the_queue_holds_are_refused_before_their_contents_are_decoded() -> None:
    message = good(5, typed=True)
    for tensor in message.inputs:
        tensor.ClearField("contents")
    with pytest.raises(RequestTooLarge, match="'x' has 5 rows; the queue of model 'm' holds 4"):
        decode_request(message, "m", MODEL, True, RegionLease(Regions()), queue_rows=4)


def test_a_request_of_more_bytes_than_an_input_allows_is_refused_before_its_contents_are_decoded() -> None:
    message = good(1, typed=True)
    for tensor in message.inputs:
        tensor.ClearField("contents")
    bounded = replace(MODEL, inputs=(replace(MODEL.inputs[0], most_bytes=100), *MODEL.inputs[1:]))
    with pytest.raises(
        InvalidRequestError, match="has 101 bytes; model 'm' takes at most 100 with its input 'x'"
    ):
        decode_request(message, "m", bounded, True, RegionLease(Regions()), message_bytes=101)


def test_the_size_of_a_request_is_that_of_its_message() -> None:
    lease = RegionLease(Regions())
    found = decode_request(good(100), "m", MODEL, True, lease, message_bytes=12345)
    assert found.nbytes == 12345


@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize(
    ("of", "rows"),
    [(S, [["é", ""], ["a\0", "終"]]), (B, [[b"\xff\xd8\xff\xe0", b""], [b"a\0", b"text"]])],
    ids=["text", "binary"],
)
def test_strings_become_text_unless_the_input_is_binary(of: TensorSpec, rows: Any, typed: bool) -> None:
    (tensor,) = decoded(request({"s": np.array(rows, object)}, typed=typed), signature(of)).tensors
    assert tensor.data.tolist() == rows
    assert (tensor.shape, tensor.dtype) == ((2, 2), np.dtype(object))


@pytest.mark.parametrize("typed", [False, True])
def test_strings_must_be_utf8(typed: bool) -> None:
    message = request({"s": np.array([[b"\xff"]], dtype=object)}, typed=typed)
    assert "input 's' of model 'm': an element is not UTF-8" in refused(message, signature(S))


@pytest.mark.parametrize("typed", [False, True])
def test_binary_elements_have_the_limits_of_strings(typed: bool) -> None:
    for rows, limits, expected in (
        (32_769, RequestLimits(), "input 's' has 65538 strings; this server takes at most 65536 in a tensor"),
        (1, RequestLimits(string_bytes=4), "input 's' has a string of 5 bytes; this server takes at most 4"),
    ):
        message = request({"s": np.array([[b"\xff" * 5, b""]] * rows, dtype=object)}, typed=typed)
        with pytest.raises(InvalidRequestError, match=expected):
            decode_request(message, "m", signature(B), True, RegionLease(Regions()), limits)


def test_without_raw_contents_a_request_is_typed() -> None:
    assert decoded(good(typed=True)).response_spec.typed
    assert not decoded(good()).response_spec.typed
    assert decoded(good(typed=True)).tensors == decoded(good()).tensors


def test_a_request_without_inputs_is_answered_raw() -> None:
    made = Signature((), (spec("y", "FP32", 5),))
    assert not decoded(request({}), made, batched=False).response_spec.typed


@pytest.mark.parametrize("dims", [(0, 1 << 62), (0, (1 << 63) - 1)])
def test_a_shape_without_elements_must_be_possible_for_an_array(dims: tuple[int, ...]) -> None:
    made = signature(spec("x", "FP32", "batch", "n"))
    message = request({"x": fp32(0, 0)})
    message.inputs[0].shape[:] = dims
    assert "larger than an array can be" in refused(message, made)


def test_the_number_of_classes_is_per_output() -> None:
    message = good()
    message.outputs.add(name="z").parameters["classification"].int64_param = 3
    message.outputs.add(name="y")
    assert [output.class_count for output in decoded(message).response_spec.outputs] == [3, 0]
    assert decoded(good()).response_spec.outputs == tuple(map(RequestedOutput, MODEL.outputs))


def with_texts(parameters: dict[str, str], *shape: int, datatype: str = "BYTES") -> pb.ModelInferRequest:
    """A request with texts in the parameters of its input, as grpcurl makes it of JSON."""
    given = {key: {"string_param": value} for key, value in parameters.items()}
    tensor = {"name": "s", "datatype": datatype, "shape": list(shape), "parameters": given}
    return json_format.ParseDict({"model_name": "m", "inputs": [tensor]}, pb.ModelInferRequest())


@pytest.mark.parametrize("key", ["text", "text_0"])
def test_one_text_in_a_parameter(key: str) -> None:
    request = decoded(with_texts({key: f"caf{E_ACUTE}\0"}, 1), TEXTS)
    assert request.tensors[0].data.tolist() == [f"caf{E_ACUTE}\0"]
    assert (request.tensors[0].shape, request.tensors[0].dtype) == ((1,), np.dtype(object))
    assert request.rows == 1
    assert request.response_spec.typed


def test_texts_are_in_the_order_of_their_numbers() -> None:
    texts = {f"text_{number}": str(number) for number in reversed(range(12))}
    (tensor,) = decoded(with_texts(texts, 12), TEXTS).tensors
    assert tensor.data.tolist() == [str(number) for number in range(12)]
    (tensor,) = decoded(with_texts(texts, 3, 4), signature(spec("s", "BYTES", "batch", 4))).tensors
    assert tensor.data.tolist() == [[str(row * 4 + at) for at in range(4)] for row in range(3)]


def test_other_parameters_are_ignored() -> None:
    parameters = {"text": "a", "text_encoding": "utf-8", "texts": "b", "text_1b": "c", "content_type": "str"}
    assert decoded(with_texts(parameters, 1), TEXTS).tensors[0].data.tolist() == ["a"]


@pytest.mark.parametrize(
    ("parameters", "shape", "expected"),
    [
        (["text", "text_0"], 2, "input 's' has the parameters text, text_0; give 'text' for one element, or 'text_0',"),
        (["text_0", "text_2"], 2, "input 's' has the parameters text_0, text_2; give 'text'"),
        (["text_00"], 1, "input 's' has the parameters text_00; give 'text'"),
        (["text"], 2, "input 's' of model 'm': shape [2] takes 2 elements, got 1 in text parameters"),
        (["text_0", "text_1"], 1, "shape [1] takes 1 elements, got 2 in text parameters"),
        (["text_encoding", "texts", "text_1b"], 1, "it has neither contents nor an entry"),
    ],
    ids=str,
)  # fmt: skip
def test_keys_that_do_not_fit_the_shape_are_refused(parameters: list[str], shape: int, expected: str) -> None:
    assert expected in refused(with_texts(dict.fromkeys(parameters, "a"), shape), TEXTS)


def test_text_is_for_bytes_only() -> None:
    message = with_texts({"text": "5"}, 1, datatype="INT64")
    text = "text parameters are for BYTES only, and the datatype is INT64: use contents"
    assert refused(message, signature(spec("s", "INT64", "batch"))) == f"input 's' of model 'm': {text}"
