"""Error messages quote at most 128 characters of any text that a client sent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
from fuzz.attackers.bombs import field
from google.protobuf.descriptor import FieldDescriptor
from server.wire.kinds import BY_METHOD
from support.server.rig import Make
from support.server.tokens import EVERY, outcome

from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.wire import bounds
from tensorferry.server.wire.bounds import FIELD_BOUNDS

LETTER = "q"


def texts(message: Any, max_bytes: int) -> Iterator[bytes]:
    """Yield the message with one text in it, for each text, as long as allowed, but at most `max_bytes`."""
    for each in message.fields:
        if each.message_type is not None:
            for inside in texts(each.message_type, max_bytes):
                yield field(each.number, inside)
        elif each.cpp_type == FieldDescriptor.CPPTYPE_STRING and message.full_name in FIELD_BOUNDS:
            size = min(FIELD_BOUNDS[message.full_name][each.name].max_bytes, max_bytes)
            yield field(each.number, LETTER.encode() * size)


def test_texts_are_truncated(start: Make) -> None:
    app = start(model_control="explicit", allow_shared_memory=True, allow_log_settings=True)
    with grpc.insecure_channel(app.address) as channel:
        for method, kind in BY_METHOD.items():
            sizes = (bounds.PARAMETER_TEXT_BYTES, 2 * bounds.CONFIG_TEXT_BYTES) if method != "Watch" else ()
            for data in (each for size in sizes for each in texts(kind.DESCRIPTOR, size)):
                if len(data) > bounds.MAX_MESSAGE_BYTES and method != "RepositoryModelLoad":
                    continue
                code, message = outcome(channel, EVERY[method], data=data)
                assert code is not grpc.StatusCode.INTERNAL, (method, message)
                assert LETTER * 129 not in message, method


def test_names_with_a_meaning_are_truncated(start: Make) -> None:
    """Such as an input that the model does not have, or a reserved parameter."""
    app = start(model_control="explicit", allow_shared_memory=True)
    long = LETTER * 1000
    infer, tensor = pb.ModelInferRequest, pb.ModelInferRequest.InferInputTensor
    region = {"shared_memory_region": pb.InferParameter(string_param=long)}
    region["shared_memory_byte_size"] = pb.InferParameter(int64_param=4)
    config = pb.ModelRepositoryParameter(string_param='{"name": "' + long + '"}')
    for method, request in (
        ("ModelInfer", infer(model_name="m", inputs=[tensor(name=long)])),
        ("ModelInfer", infer(model_name="m", inputs=[tensor(name=long), tensor(name=long)])),
        ("ModelInfer", infer(model_name="m", parameters={f"triton_{long}": pb.InferParameter()})),
        ("ModelInfer", infer(model_name="m", inputs=[tensor(name="x", datatype="FP32", parameters=region)])),
        ("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name="m", parameters={"config": config})),
        ("SystemSharedMemoryRegister", pb.SystemSharedMemoryRegisterRequest(name=long, key="no such key")),
        ("SystemSharedMemoryRegister", pb.SystemSharedMemoryRegisterRequest(name="r", key=long[:255])),
        (
            "TraceSetting",
            pb.TraceSettingRequest(
                settings={"trace_rate": pb.TraceSettingRequest.SettingValue(value=["1" * 1000])}
            ),
        ),
    ):
        with grpc.insecure_channel(app.address) as channel:
            code, details = outcome(channel, EVERY[method], data=request.SerializeToString())
        assert code not in (grpc.StatusCode.OK, grpc.StatusCode.INTERNAL)
        assert LETTER * 129 not in details
        assert "1" * 129 not in details
