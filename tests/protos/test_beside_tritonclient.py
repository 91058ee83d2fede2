"""tritonclient's generated code and ours share a process, and parse each other's bytes."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from google.protobuf import descriptor_pool
from tritonclient.grpc import service_pb2 as triton

from tensorferry.protos import POOL, inference_pb2


@pytest.mark.parametrize(
    "order",
    [
        ("tensorferry.protos", "tritonclient.grpc.service_pb2"),
        ("tritonclient.grpc.service_pb2", "tensorferry.protos"),
    ],
    ids=["ours first", "theirs first"],
)
def test_both_are_imported_in_either_order(order: tuple[str, str]) -> None:
    script = f"""
import sys
sys.path[:0] = {sys.path!r}
import {order[0]}, {order[1]}
from tensorferry.protos import inference_pb2 as ours
from tritonclient.grpc import service_pb2 as theirs
assert theirs.ModelInferRequest(model_name="m").SerializeToString() == ours.ModelInferRequest(model_name="m").SerializeToString()
"""
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, timeout=60)


def test_our_descriptors_stay_out_of_the_process_wide_pool() -> None:
    theirs = descriptor_pool.Default().FindMessageTypeByName("inference.ModelInferRequest")
    ours = POOL.FindMessageTypeByName("inference.ModelInferRequest")
    assert theirs is triton.ModelInferRequest.DESCRIPTOR
    assert ours is inference_pb2.ModelInferRequest.DESCRIPTOR
    assert ours is not theirs


def request(pb: Any) -> Any:
    """Return a request that uses every field, of either package."""
    message = pb.ModelInferRequest(
        model_name="m", model_version="3", id="é", raw_input_contents=[b"\0\1", b""]
    )
    message.parameters["flag"].bool_param = True
    message.parameters["count"].int64_param = -(1 << 63)
    message.parameters["big"].uint64_param = (1 << 64) - 1
    message.parameters["text"].string_param = "t"
    message.parameters["ratio"].double_param = 0.5
    tensor = message.inputs.add(name="x", datatype="INT32", shape=[-1, 0, 1 << 62])
    tensor.parameters["p"].bool_param = False
    tensor.contents.int_contents.extend([-1, 2])
    tensor.contents.bytes_contents.append(b"\xff")
    tensor.contents.fp32_contents.extend([0.5, float("inf")])
    message.outputs.add(name="y").parameters["classification"].int64_param = 2
    return message


def response(pb: Any) -> Any:
    message = pb.ModelStreamInferResponse(error_message="e")
    inner = message.infer_response
    inner.id = "7"
    inner.outputs.add(name="y", datatype="FP64", shape=[2]).contents.fp64_contents.extend([1.5, -0.0])
    inner.raw_output_contents.append(b"\2")
    inner.parameters["triton_final_response"].bool_param = True
    return message


@pytest.mark.parametrize("build", [request, response])
def test_bytes_are_the_same_and_read_by_both(build: Any) -> None:
    ours, theirs = build(inference_pb2), build(triton)
    assert ours.SerializeToString(deterministic=True) == theirs.SerializeToString(deterministic=True)
    assert type(ours).FromString(theirs.SerializeToString()) == ours
    assert type(theirs).FromString(ours.SerializeToString()) == theirs


def test_the_field_that_only_we_have_does_not_disturb_them() -> None:
    ours = inference_pb2.ModelMetadataResponse(name="m", platform="p", properties={"a": "b"})
    theirs = triton.ModelMetadataResponse.FromString(ours.SerializeToString())
    assert (theirs.name, theirs.platform) == ("m", "p")
    back = inference_pb2.ModelMetadataResponse.FromString(theirs.SerializeToString())
    assert dict(back.properties) == {"a": "b"}
