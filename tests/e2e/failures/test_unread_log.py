"""Stderr is a pipe that is never read: the server keeps serving, and stops on SIGTERM."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import onnx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.models import small
from support.processes.server import command, environment

from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos import inference_pb2_grpc

PATIENCE = 60
FAILING = 300


@pytest.fixture(scope="module")
def wordy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that fails on an index of 10 and more, with a message of a thousand characters."""
    path = small.lookup(tmp_path_factory.mktemp("wordy") / "m.onnx")
    model = onnx.load(str(path))
    model.graph.node[0].name = "/a" * 500
    onnx.save(model, str(path))
    return path


def request(index: int) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(
        model_name="m", id="i" * 1000, raw_input_contents=[np.array([index]).tobytes()]
    )
    message.inputs.add(name="index", datatype="INT64", shape=[1])
    return message


def test_failing_requests_stop_nothing(wordy_model: Path, transport: str) -> None:
    options = ("--port", 0, "--host", "127.0.0.1", "--transport", transport, "--device", "cpu")
    process = subprocess.Popen(
        # Repeated warnings are limited, but each answer has a debug line.
        [*command("serve", wordy_model, "--log-format", "json"), *map(str, options), "--log-level", "debug"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    with process:
        try:
            assert process.stdout is not None
            address = json.loads(process.stdout.readline())["address"]
            with grpc.insecure_channel(address) as channel:
                stub: Any = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
                for _ in range(FAILING // 50):
                    calls = [stub.ModelInfer.future(request(99), timeout=PATIENCE) for _ in range(50)]
                    assert {call.exception().code() for call in calls} == {grpc.StatusCode.INTERNAL}
                answer = stub.ModelInfer(request(3), timeout=PATIENCE)
                assert np.frombuffer(answer.raw_output_contents[0], np.float32).tolist() == [3.0]
                health = health_pb2_grpc.HealthStub(channel)
                status = health.Check(health_pb2.HealthCheckRequest(service="m"), timeout=PATIENCE).status
                assert status == health_pb2.HealthCheckResponse.SERVING
            process.terminate()
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()
