"""An execution provider of a package of its own, which is in no environment of other tests."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from polling import PATIENCE
from support.processes.server import run_command, running
from support.wire.programs import CLIENTS, needs

from tensorferry.client import InferenceClient

pytestmark = pytest.mark.skipif(
    not hasattr(onnxruntime, "register_execution_provider_library"), reason="onnxruntime is too old"
)
PROVIDERS = CLIENTS / "providers"
OPTIONS = ("--providers", "onnxruntime-ep-openvino", "--device", "cpu")
IMAGES = np.random.default_rng(0).integers(0, 17, (20, 8, 8), np.uint8)


def inspected(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run `tensorferry inspect`, which finds the packages of `make tools`."""
    return run_command(
        "inspect", *arguments, "--json", "--no-measure", variables={"PYTHONPATH": str(PROVIDERS)}
    )


@needs(PROVIDERS / ".done")
def test_it_runs_the_nodes_and_gives_the_answers_of_the_cpu(digits_model: Path) -> None:
    (found,) = json.loads(inspected(digits_model, *OPTIONS).stdout)["models"]
    assert found["nodes_by_provider"]["OpenVINOExecutionProvider"]["Gemm"] == 3
    assert found["batching"]["verdict"] == "proved"
    answers = []
    for options in (OPTIONS, ()):
        variables = {"PYTHONPATH": str(PROVIDERS)}
        with (
            running(digits_model, *options, transport="lane", variables=variables) as server,
            InferenceClient(server.address) as client,
        ):
            answers.append(client.infer("digits", {"image": IMAGES}, timeout=PATIENCE)["probabilities"])
    np.testing.assert_allclose(answers[0], answers[1], atol=0.05)


def test_a_package_that_is_not_installed_is_named(digits_model: Path) -> None:
    ended = inspected(digits_model, "--providers", "onnxruntime-ep-absent", "--device", "cpu")
    assert ended.returncode == 1
    assert "the provider onnxruntime-ep-absent is not installed" in ended.stdout + ended.stderr
