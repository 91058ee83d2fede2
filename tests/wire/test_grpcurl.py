"""grpcurl without .proto files: list, describe, infer with typed contents, health."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.processes.server import ServerProcess, running

GRPCURL = shutil.which("grpcurl", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")

# Without Go, as on a developer's machine, these tests are skipped; CI must run them.
pytestmark = pytest.mark.skipif(
    GRPCURL is None and not os.environ.get("CI"), reason="grpcurl is not installed: make tools installs it"
)


@pytest.fixture(scope="module")
def server(transport: str, digits_model: Path) -> Iterator[ServerProcess]:
    assert GRPCURL is not None, "CI needs grpcurl: make tools"
    with running(f"digits={digits_model}", transport=transport) as server:
        yield server


def grpcurl(server: ServerProcess, *arguments: str, data: Any = None) -> subprocess.CompletedProcess[str]:
    given = [] if data is None else ["-d", json.dumps(data)]
    return subprocess.run(
        [str(GRPCURL), "-plaintext", "-max-time", "30", *given, server.address, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )


def infer(server: ServerProcess, **changes: Any) -> subprocess.CompletedProcess[str]:
    heldout = np.load(Path(__file__).resolve().parents[2] / "examples" / "digits" / "heldout.npz")
    pixels = heldout["images"][0].reshape(-1).tolist()
    image = {"name": "image", "datatype": "UINT8", "shape": [1, 8, 8], "contents": {"uint_contents": pixels}}
    data = {"model_name": "digits", "inputs": [{**image, **changes}]}
    return grpcurl(server, "inference.GRPCInferenceService/ModelInfer", data=data)


def test_list(server: ServerProcess) -> None:
    services = grpcurl(server, "list").stdout.split()
    assert services == [
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
        "inference.GRPCInferenceService",
    ]
    methods = grpcurl(server, "list", "inference.GRPCInferenceService").stdout.split()
    assert len(methods) == 20


def test_describe(server: ServerProcess) -> None:
    service = grpcurl(server, "describe", "inference.GRPCInferenceService").stdout
    assert "rpc ModelStreamInfer ( stream .inference.ModelInferRequest )" in service
    assert (
        "repeated bytes raw_input_contents = 7;"
        in grpcurl(server, "describe", "inference.ModelInferRequest").stdout
    )
    assert "max_batch_size = 4;" in grpcurl(server, "describe", "inference.ModelConfig").stdout


def test_typed_contents_are_answered_in_a_form_that_a_person_can_read(server: ServerProcess) -> None:
    heldout = np.load(Path(__file__).resolve().parents[2] / "examples" / "digits" / "heldout.npz")
    result = infer(server)
    assert result.returncode == 0, result.stderr
    response = json.loads(result.stdout)
    outputs = {output["name"]: output for output in response["outputs"]}
    assert outputs["label"]["contents"]["int64_contents"] == [str(heldout["labels"][0])]
    assert len(outputs["probabilities"]["contents"]["fp32_contents"]) == 10
    assert "raw_output_contents" not in response


def test_an_error_is_reported(server: ServerProcess) -> None:
    result = infer(server, shape=[1, 64])
    assert "InvalidArgument" in result.stderr
    assert "Expected [-1, 8, 8], got [1, 64]" in result.stderr
    result = infer(server, contents={"fp32_contents": [1.0]})
    assert "UINT8 travels in uint_contents, got fp32_contents" in result.stderr


def test_stream(server: ServerProcess) -> None:
    data = {"model_name": "other", "id": "x"}
    result = grpcurl(server, "inference.GRPCInferenceService/ModelStreamInfer", data=data)
    assert "unknown model: 'other'" in json.loads(result.stdout)["error_message"]


def test_health(server: ServerProcess) -> None:
    result = grpcurl(server, "grpc.health.v1.Health/Check", data={"service": "digits"})
    assert json.loads(result.stdout) == {"status": "SERVING"}
