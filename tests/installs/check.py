"""Run by an environment's Python: start its server, and ask it for health, descriptors and answers.

With a third argument, the command `tensorferry` of another environment asks it, too.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import grpc
import numpy as np

from tensorferry.client import InferenceClient
from tensorferry.protos.standard import health_pb2, reflection_pb2

TIMEOUT = 30


def main(model: str, transport: str, *clients: str) -> None:
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
            for client in clients:
                check_command(client, address, model)
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
        assert client.server_metadata(timeout=TIMEOUT).version == version("tensorferry")
    if find_spec("tritonclient") is not None:
        from tritonclient.grpc import InferenceServerClient, InferInput

        given = InferInput("image", image.shape, "UINT8")
        given.set_data_from_numpy(image)
        with InferenceServerClient(address) as other:
            assert other.infer("digits", [given]).as_numpy("label").shape == (1,)


def check_command(client: str, address: str, model: str) -> None:
    images = Path(model).with_name("images.npy")
    infer = [client, "infer", "digits", "--target", address, "--input", f"image={images}"]
    subprocess.run([client, "ready", "--target", address], check=True, timeout=TIMEOUT)
    answer = subprocess.run(infer, check=True, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT)
    assert "label" in answer.stdout


if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).parent))
    main(*sys.argv[1:])
