"""What comes over the wire is held against the signature; what does not fit is refused in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.server.rig import fp32, request, signature, spec

from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos.tensors import TensorError
from tensorferry.server.errors import InvalidRequestError
from tensorferry.server.inference.codec import DecodedRequest, decode_request
from tensorferry.server.shared_memory.regions import RegionLease, Regions
from tensorferry.server.signature import Signature
from tensorferry.server.wire.receiving import parse

X, N, S = spec("x", "FP32", "batch", 3), spec("n", "INT64", "batch"), spec("s", "BYTES", "batch", "k")
MODEL = signature(X, N, outputs=(spec("y", "FP32", "batch", 3), spec("z", "INT64", "batch")))


def good(rows: int = 2, *, typed: bool = False) -> pb.ModelInferRequest:
    return request({"x": fp32(rows, 3), "n": np.arange(rows)}, typed=typed)


def held(message: pb.ModelInferRequest, made: Any = MODEL, *, batched: bool = True) -> DecodedRequest:
    return decode_request(message, "m", made, batched, RegionLease(Regions()))


def refused(message: pb.ModelInferRequest, made: Any = MODEL, *, batched: bool = True) -> str:
    with pytest.raises((InvalidRequestError, TensorError)) as caught:
        held(message, made, batched=batched)
    return str(caught.value)


def test_tensors_are_in_the_models_order_whatever_the_requests() -> None:
    message = request({"n": np.array([5, 6]), "x": fp32(2, 3)})
    for x, n in (held(message).tensors, held(good()).tensors):
        assert (x.shape, x.dtype, x.data) == ((2, 3), np.dtype("<f4"), fp32(2, 3).tobytes())
        assert n.shape == (2,)
    assert held(message).tensors[1].data == np.array([5, 6]).tobytes()


def test_rows_are_axis_0_of_a_batched_model_and_one_of_any_other() -> None:
    assert held(good(5)).rows == 5
    assert held(good(0)).rows == 0
    assert held(good(5), batched=False).rows == 1


def test_requests_of_one_key_are_those_that_differ_in_rows_only() -> None:
    texts = signature(S)

    def key(*shape: int) -> Any:
        return held(request({"s": np.full(shape, b"t", dtype=object)}), texts).key

    assert key(1, 2) == key(7, 2)
    assert key(1, 2) != key(1, 3)
    assert held(good(1)).key == held(good(1, typed=True)).key


def test_a_request_is_as_large_as_its_message() -> None:
    message = good(100)
    assert held(message).nbytes == len(message.SerializeToString())


@pytest.mark.parametrize("typed", [False, True])
def test_strings_become_text(typed: bool) -> None:
    array = np.array([["é", ""], ["a\0", "終"]], dtype=object)
    (tensor,) = held(request({"s": array}, typed=typed), signature(S)).tensors
    assert tensor.data.tolist() == array.tolist()
    assert (tensor.shape, tensor.dtype) == ((2, 2), np.dtype(object))


@pytest.mark.parametrize("typed", [False, True])
def test_strings_that_are_not_utf8(typed: bool) -> None:
    message = request({"s": np.array([[b"\xff"]], dtype=object)}, typed=typed)
    assert "input 's' of model 'm': an element is not UTF-8" in refused(message, signature(S))


def test_without_raw_contents_a_request_is_typed() -> None:
    assert held(good(typed=True)).response_spec.typed
    assert not held(good()).response_spec.typed
    assert held(good(typed=True)).tensors == held(good()).tensors


def test_a_request_without_inputs_is_answered_raw_as_clients_expect() -> None:
    made = Signature((), (spec("y", "FP32", 5),))
    assert not held(request({}), made, batched=False).response_spec.typed


@pytest.mark.parametrize("typed", [False, True])
def test_zero_rows(typed: bool) -> None:
    decoded = held(good(0, typed=typed))
    assert [tensor.shape for tensor in decoded.tensors] == [(0, 3), (0,)]


def test_scalars_of_a_model_without_batch_axis() -> None:
    made = signature(spec("s", "FP32"))
    assert held(request({"s": np.array(1.5, np.float32)}), made, batched=False).tensors[0].shape == ()


# Each takes a good request (inputs x FP32 [2, 3] and n INT64 [2], raw) and spoils it.
Spoil = Callable[[pb.ModelInferRequest], Any]


def rename(message: pb.ModelInferRequest) -> None:
    message.inputs[1].name = "other"


def drop(message: pb.ModelInferRequest) -> None:
    del message.inputs[1]
    del message.raw_input_contents[1]


def nothing(message: pb.ModelInferRequest) -> None:
    message.Clear()


def double(message: pb.ModelInferRequest) -> None:
    message.inputs.append(message.inputs[0])
    message.raw_input_contents.append(message.raw_input_contents[0])


def add(message: pb.ModelInferRequest) -> None:
    message.inputs.add(name="more", datatype="FP32", shape=[2])
    message.raw_input_contents.append(b"12345678")


def shape(*dims: int) -> Spoil:
    def spoil(message: pb.ModelInferRequest) -> None:
        message.inputs[0].shape[:] = dims

    return spoil


def datatype(name: str) -> Spoil:
    def spoil(message: pb.ModelInferRequest) -> None:
        message.inputs[0].datatype = name

    return spoil


def raw(*contents: bytes) -> Spoil:
    def spoil(message: pb.ModelInferRequest) -> None:
        message.raw_input_contents[:] = contents

    return spoil


def mixed(message: pb.ModelInferRequest) -> None:
    message.inputs[1].contents.int64_contents.extend([1, 2])


def mixed_empty(message: pb.ModelInferRequest) -> None:
    message.inputs[1].contents.SetInParent()


def other_rows(message: pb.ModelInferRequest) -> None:
    message.inputs[1].shape[:] = [3]
    message.raw_input_contents[1] = bytes(24)


GOT_X = "expected 2 inputs but got 1 inputs for model 'm'. Got input(s) ['x'], but missing required input(s) ['n']"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (rename, "unexpected inference input 'other' for model 'm'; it takes ['x', 'n']"),
        (add, "unexpected inference input 'more' for model 'm'; it takes ['x', 'n']"),
        (drop, GOT_X),
        (nothing, "Got input(s) [], but missing required input(s) ['x', 'n']"),
        (double, "input 'x' already exists in request for model 'm'"),
        (datatype("FP64"), "inference input 'x' data-type is 'FP64', but model 'm' expects 'FP32'"),
        (datatype("fp32"), "datatype 'fp32' is not one of BOOL"),
        (datatype(""), "datatype '' is not one of BOOL"),
        (shape(), "input 'x' has no shape but model 'm' requires a batch dimension"),
        (
            shape(6),
            "unexpected shape for input 'x' for model 'm'. Expected [-1, 3], got [6] (axis 0 counts rows)",
        ),
        (shape(2, 3, 1), "Expected [-1, 3], got [2, 3, 1]"),
        (shape(3, 2), "Expected [-1, 3], got [3, 2]"),
        (shape(2, -1), "Expected [-1, 3], got [2, -1]"),
        (shape(-1, 3), "Expected [-1, 3], got [-1, 3]"),
        (shape(-2, -3), "Expected [-1, 3], got [-2, -3]"),
        (
            shape(1, 3),
            "input byte size mismatch for input 'x' for model 'm'. Expected 12, got 24 (FP32 of shape [1, 3])",
        ),
        (shape(1 << 62, 3), "shape [4611686018427387904, 3] is larger than an array can be"),
        (
            raw(bytes(24)),
            "unable to find data for input tensor 'n' for model 'm' in request: raw_input_contents has 1 entries for the 2 inputs of model 'm'; it must have one for each",
        ),
        (raw(bytes(24), bytes(16), b""), "raw_input_contents has 3 entries for the 2 inputs of model 'm'"),
        (raw(bytes(24), bytes(15)), "for input 'n' for model 'm'. Expected 16, got 15 (INT64 of shape [2])"),
        (raw(bytes(25), bytes(16)), "Expected 24, got 25 (FP32 of shape [2, 3])"),
        (raw(b"", bytes(16)), "Expected 24, got 0 (FP32 of shape [2, 3])"),
        (
            raw(),
            "unable to find data for input tensor 'x' for model 'm' in request: it has neither contents nor an entry in "
            "raw_input_contents",
        ),
        (
            mixed,
            "contents field must not be specified when using raw_input_contents for input 'n' for model 'm'",
        ),
        (mixed_empty, "contents field must not be specified when using raw_input_contents for input 'n'"),
        (
            other_rows,
            "input 'n' batch size does not match other inputs for model 'm': 3 rows, 'x' has 2",
        ),
    ],
)
def test_a_raw_request_that_does_not_fit(spoil: Spoil, message: str) -> None:
    spoiled = good()
    spoil(spoiled)
    assert message in refused(spoiled)


def test_rows_are_counted_for_batched_models_alone() -> None:
    spoiled = good()
    other_rows(spoiled)
    assert [tensor.shape for tensor in held(spoiled, batched=False).tensors] == [(2, 3), (3,)]


def test_no_hint_of_rows_where_axis_0_does_not_count_them() -> None:
    spoiled = good()
    shape()(spoiled)
    assert refused(spoiled, batched=False).endswith("Expected [-1, 3], got []")


def test_fixed_dimensions_hold_for_axis_0_too() -> None:
    made = signature(spec("x", "FP32", 1, 3))
    assert held(request({"x": fp32(1, 3)}), made, batched=False).rows == 1
    assert "Expected [1, 3], got [2, 3]" in refused(request({"x": fp32(2, 3)}), made, batched=False)


@pytest.mark.parametrize("dims", [(0, 1 << 62), (0, (1 << 63) - 1)])
def test_a_shape_without_elements_must_still_be_one_that_an_array_can_have(dims: tuple[int, ...]) -> None:
    made = signature(spec("x", "FP32", "batch", "n"))
    message = request({"x": fp32(0, 0)})
    message.inputs[0].shape[:] = dims
    assert "larger than an array can be" in refused(message, made)


def test_the_wrong_field_of_typed_contents() -> None:
    message = good(typed=True)
    message.inputs[0].contents.fp64_contents.append(1.0)
    assert (
        refused(message)
        == "input 'x' of model 'm': FP32 travels in fp32_contents, got fp32_contents, fp64_contents"
    )


def test_too_few_typed_elements() -> None:
    message = good(typed=True)
    del message.inputs[1].contents.int64_contents[1:]
    assert refused(message) == "input 'n' of model 'm': shape [2] takes 2 elements in int64_contents, got 1"


@pytest.mark.parametrize("name", ["FP16", "BF16"])
def test_half_floats_have_to_be_raw(name: str) -> None:
    message = request({"x": fp32(1, 3)}, typed=True)
    message.inputs[0].datatype = name
    made = signature(spec("x", name, "batch", 3))
    assert f"{name} has no typed contents; send it in raw_input_contents" in refused(message, made)


def test_malformed_bytes_elements() -> None:
    message = request({"s": np.array([[b"text"]], dtype=object)})
    message.raw_input_contents[0] = b"\5\0\0\0text"
    assert "input 's' of model 'm': BYTES element 0 should have 5 bytes, only 4 are left" in refused(
        message, signature(S)
    )


def test_outputs_are_the_models_unless_some_are_named() -> None:
    message = good()
    assert held(message).response_spec.outputs == MODEL.outputs
    message.outputs.add(name="z")
    assert held(message).response_spec.outputs == MODEL.outputs[1:]
    message.outputs.add(name="y")
    assert [output.name for output in held(message).response_spec.outputs] == ["z", "y"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["w"], "unexpected inference output 'w' for model 'm'; it gives ['y', 'z']"),
        (["y", "w"], "unexpected inference output 'w'"),
        ([""], "unexpected inference output ''"),
        (["z", "y", "z"], "output 'z' already exists in request for model 'm'"),
    ],
)
def test_outputs_that_cannot_be_given(names: list[str], message: str) -> None:
    asked = good()
    for name in names:
        asked.outputs.add(name=name)
    assert message in refused(asked)


def asked_for_classes(name: str, **given: Any) -> pb.ModelInferRequest:
    message = good()
    parameter = message.outputs.add(name=name).parameters["classification"]
    parameter.CopyFrom(pb.InferParameter(**given))
    return message


def test_classes_are_wanted_by_output() -> None:
    message = asked_for_classes("z", int64_param=3)
    message.outputs.add(name="y")
    assert held(message).response_spec.class_counts == (3, 0)
    assert held(good()).response_spec.class_counts == ()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"int64_param": 0},
            "invalid value for 'classification' parameter of output 'z', expected the number of classes, at least 1, got 0",
        ),
        ({"int64_param": -1}, "invalid value for 'classification' parameter"),
        (
            {"string_param": "3"},
            "invalid value type for 'classification' parameter, expected int64_param, got string_param",
        ),
        ({}, "expected int64_param, got none"),
    ],
)
def test_a_number_of_classes_that_is_none(given: dict[str, Any], message: str) -> None:
    assert message in refused(asked_for_classes("z", **given))


@pytest.mark.parametrize("kind", ["BYTES", "BOOL", "FP16", "BF16"])
def test_what_has_no_values_that_compare_has_no_classes(kind: str) -> None:
    made = signature(X, N, outputs=(spec("z", kind, "batch"),))
    assert f"class result not available for output due to unsupported type '{kind}': output 'z'" in refused(
        asked_for_classes("z", int64_param=1), made
    )


def test_other_parameters_are_no_concern() -> None:
    message = good()
    message.parameters["anything"].string_param = "x"
    message.inputs[0].parameters["binary_data_size"].int64_param = 24
    message.outputs.add(name="y").parameters["binary_data"].bool_param = True
    assert held(message).rows == 2


@pytest.mark.parametrize("data", [b"\xff", b"\x0a\x05abc", b"\x0a\x01\xff", b"text", b"\0"])
@pytest.mark.parametrize("kind", [pb.ModelInferRequest, pb.ModelReadyRequest])
def test_bytes_that_are_no_message(data: bytes, kind: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse(data, kind)
    assert str(caught.value) == f"the message of {len(data)} bytes is not a {kind.__name__}"


def test_fields_of_a_newer_protocol_are_no_concern() -> None:
    unknown = b"\xfa\x7f\x03new"
    assert parse(good().SerializeToString() + unknown, pb.ModelInferRequest).model_name == "m"
