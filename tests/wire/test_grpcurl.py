"""grpcurl without .proto files: list, describe, infer with typed contents, health."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.processes.server import ServerProcess

GRPCURL = shutil.which("grpcurl", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")

# Without Go, as on a developer's machine, these tests are skipped; CI must run them.
needs_grpcurl = pytest.mark.skipif(
    GRPCURL is None and not os.environ.get("CI"), reason="grpcurl is not installed: make tools installs it"
)
pytestmark = needs_grpcurl


def grpcurl(server: ServerProcess, *arguments: str, data: Any = None) -> subprocess.CompletedProcess[str]:
    assert GRPCURL is not None, "CI needs grpcurl: make tools"
    given = [] if data is None else ["-d", json.dumps(data)]
    return subprocess.run(
        [GRPCURL, "-plaintext", "-max-time", "30", *given, server.address, *arguments],
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


def test_list(plain: ServerProcess) -> None:
    services = grpcurl(plain, "list").stdout.split()
    assert services == [
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
        "inference.GRPCInferenceService",
    ]
    methods = grpcurl(plain, "list", "inference.GRPCInferenceService").stdout.split()
    assert len(methods) == 20


def test_describe(plain: ServerProcess) -> None:
    service = grpcurl(plain, "describe", "inference.GRPCInferenceService").stdout
    assert "rpc ModelStreamInfer ( stream .inference.ModelInferRequest )" in service
    assert (
        "repeated bytes raw_input_contents = 7;"
        in grpcurl(plain, "describe", "inference.ModelInferRequest").stdout
    )
    assert "max_batch_size = 4;" in grpcurl(plain, "describe", "inference.ModelConfig").stdout


def test_typed_contents_are_answered_in_a_form_that_a_person_can_read(plain: ServerProcess) -> None:
    heldout = np.load(Path(__file__).resolve().parents[2] / "examples" / "digits" / "heldout.npz")
    result = infer(plain)
    assert result.returncode == 0, result.stderr
    response = json.loads(result.stdout)
    outputs = {output["name"]: output for output in response["outputs"]}
    assert outputs["label"]["contents"]["int64_contents"] == [str(heldout["labels"][0])]
    assert len(outputs["probabilities"]["contents"]["fp32_contents"]) == 10
    assert "raw_output_contents" not in response


def texts(server: ServerProcess, shape: int, **texts: str) -> subprocess.CompletedProcess[str]:
    parameters = {key: {"string_param": text} for key, text in texts.items()}
    given = {"name": "x", "datatype": "BYTES", "shape": [1, shape], "parameters": parameters}
    data = {"model_name": "echo-BYTES", "inputs": [given]}
    return grpcurl(server, "inference.GRPCInferenceService/ModelInfer", data=data)


@pytest.mark.parametrize(
    "given",
    [{"text": "A plain sentence"}, {"text_1": "second", "text_0": "f\u00efrst \N{WHITE STAR}"}],
    ids=str,
)
def test_text_is_plain(echoes: ServerProcess, given: dict[str, str]) -> None:
    result = texts(echoes, len(given), **given)
    assert result.returncode == 0, result.stderr
    (output,) = json.loads(result.stdout)["outputs"]
    # In answers, grpcurl writes bytes in base64.
    answered = [base64.b64decode(element).decode() for element in output["contents"]["bytes_contents"]]
    assert answered == [given[key] for key in sorted(given)]


def test_an_error_is_reported(plain: ServerProcess) -> None:
    result = infer(plain, shape=[1, 64])
    assert "InvalidArgument" in result.stderr
    assert "Expected [-1, 8, 8], got [1, 64]" in result.stderr
    result = infer(plain, contents={"fp32_contents": [1.0]})
    assert "UINT8 travels in uint_contents, got fp32_contents" in result.stderr


def test_stream(plain: ServerProcess) -> None:
    data = {"model_name": "other", "id": "x"}
    result = grpcurl(plain, "inference.GRPCInferenceService/ModelStreamInfer", data=data)
    assert "unknown model: 'other'" in json.loads(result.stdout)["error_message"]


def test_health(plain: ServerProcess) -> None:
    result = grpcurl(plain, "grpc.health.v1.Health/Check", data={"service": "digits"})
    assert json.loads(result.stdout) == {"status": "SERVING"}
