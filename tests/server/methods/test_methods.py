"""The other methods of the service: health, metadata, the index, and methods that are not implemented."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from support.server.rig import PATIENCE, signature, spec
from support.server.scripted_service import ServedTransport

from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.models.lifecycle.model import Model

METHODS = {
    method.name: method
    for method in pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods
    if not method.client_streaming
}
IMPLEMENTED = {
    "ServerLive",
    "ServerReady",
    "ModelReady",
    "ServerMetadata",
    "ModelMetadata",
    "ModelConfig",
    "ModelInfer",
    "RepositoryIndex",
}


def model(name: str = "m", version: str = "1") -> Model:
    made = signature(
        spec("x", "FP32", "batch", 3),
        spec("s", "BYTES", ""),
        spec("b", "BYTES", "", binary=True),
        outputs=(spec("y", "INT64", "batch"),),
    )
    batcher = cast(Any, SimpleNamespace(settings=SimpleNamespace(max_queue_size=4096)))
    return Model(
        name, version, made, 8, "batches of up to 8 rows (proved)", batcher, batching_verdict="proved"
    )


def refused(served: ServedTransport, method: str, message: Any) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        getattr(served.stub, method)(message, timeout=PATIENCE)
    return caught.value


def test_all_methods_of_the_protocol_are_known() -> None:
    assert len(METHODS) == 19
    assert METHODS.keys() > IMPLEMENTED


def test_methods_that_are_not_implemented_say_so(served: ServedTransport) -> None:
    for method in sorted(METHODS.keys() - IMPLEMENTED):
        error = refused(served, method, getattr(pb, METHODS[method].input_type.name)())
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED
        assert error.details() == f"{method} is not implemented by this server"


def test_bytes_that_are_no_message_are_a_client_error(served: ServedTransport) -> None:
    served.be_real()
    for method, described in METHODS.items():
        with pytest.raises(grpc.RpcError) as caught:
            served.unary(method)(b"\xff\xff", timeout=PATIENCE)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.details() == f"the message of 2 bytes is not a {described.input_type.name}"


def test_whether_a_model_is_ready(served: ServedTransport) -> None:
    def ready(name: str, version: str = "") -> bool:
        request = pb.ModelReadyRequest(name=name, version=version)
        answer: bool = served.stub.ModelReady(request, timeout=PATIENCE).ready
        return answer

    served.registry.mark_loading("m", "1")
    assert not ready("m")
    served.registry.mark_ready(model())
    assert ready("m")
    assert ready("m", "1")
    assert not ready("m", "2")
    assert not ready("unknown")
    served.registry.mark_unloading(model())
    assert not ready("m")
    served.registry.mark_ready(model())
    served.service.begin_drain()
    assert not ready("m")
    error = refused(served, "ModelReady", pb.ModelReadyRequest(name="m", version="one"))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("version", ["", "2"])
def test_model_metadata(served: ServedTransport, version: str) -> None:
    for number in ("1", "2"):
        served.registry.mark_ready(model(version=number))
    tensor = pb.ModelMetadataResponse.TensorMetadata
    request = pb.ModelMetadataRequest(name="m", version=version)
    assert served.stub.ModelMetadata(request, timeout=PATIENCE) == pb.ModelMetadataResponse(
        name="m",
        versions=["1", "2"],
        platform="onnxruntime_onnx",
        inputs=[
            tensor(name="x", datatype="FP32", shape=[-1, 3]),
            tensor(name="s", datatype="BYTES", shape=[-1]),
            tensor(name="b", datatype="BYTES", shape=[-1]),
        ],
        outputs=[tensor(name="y", datatype="INT64", shape=[-1])],
        properties={
            "batching": "batches of up to 8 rows (proved)",
            "batching_verdict": "proved",
            "max_request_rows": "4096",
            "max_message_bytes": str(64 << 20),
        },
    )


def test_the_metadata_has_the_least_bound_of_a_request(served: ServedTransport) -> None:
    x, *others = model().signature.inputs
    bounded = replace(model().signature, inputs=(replace(x, most_bytes=1000), *others))
    served.registry.mark_ready(replace(model(), signature=bounded))
    answer = served.stub.ModelMetadata(pb.ModelMetadataRequest(name="m"), timeout=PATIENCE)
    assert answer.properties["max_message_bytes"] == "1000"
