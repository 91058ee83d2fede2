"""Run by an environment's Python: start its server, and ask it for health, descriptors and answers."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import grpc
import numpy as np

from tensorferry.client import InferenceClient
from tensorferry.protos.standard import health_pb2, reflection_pb2

TIMEOUT = 30


def main(model: str, transport: str) -> None:
    command = ["-m", "tensorferry.server", "serve", model, "--port", "0", "--transport", transport]
    server = subprocess.Popen(
        [sys.executable, *command, "--log-format", "json"], stdout=subprocess.PIPE, text=True
    )
    with server:
        try:
            assert server.stdout is not None
            address = json.loads(server.stdout.readline())["address"]
            check_health_and_reflection(address)
            check_inference(address)
            server.terminate()
            assert server.wait(TIMEOUT) == 0
        finally:
            server.kill()


def check_health_and_reflection(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        answer = check(health_pb2.HealthCheckRequest(service="digits"), timeout=TIMEOUT)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        for service in ("grpc.reflection.v1", "grpc.reflection.v1alpha"):
            ask = channel.stream_stream(
                f"/{service}.ServerReflection/ServerReflectionInfo",
                request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
                response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
            )
            symbol = "inference.GRPCInferenceService"
            request = reflection_pb2.ServerReflectionRequest
            asked = iter([request(list_services=""), request(file_containing_symbol=symbol)])
            listed, described = ask(asked, timeout=TIMEOUT)
            assert symbol in {one.name for one in listed.list_services_response.service}
            assert described.file_descriptor_response.file_descriptor_proto


def check_inference(address: str) -> None:
    image = np.zeros((1, 8, 8), np.uint8)
    with InferenceClient(address) as client:
        assert client.infer("digits", {"image": image}, timeout=TIMEOUT)["label"].shape == (1,)
    if find_spec("tritonclient") is not None:
        from tritonclient.grpc import InferenceServerClient, InferInput

        given = InferInput("image", image.shape, "UINT8")
        given.set_data_from_numpy(image)
        with InferenceServerClient(address) as other:
            assert other.infer("digits", [given]).as_numpy("label").shape == (1,)


if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).parent))
    main(*sys.argv[1:])
