"""The verdicts of `tensorferry inspect` are those of the server that serves the same files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
from conformance.cured import cured_models, saved
from conformance.exported import exported
from e2e.fixtures import Serve
from support.models import mixing, small
from support.processes.server import run_command

from tensorferry.client import InferenceClient

# Some of each verdict; `make batching-evidence` inspects all.
NAMES = (
    "torch_cnn", "sklearn_categories", "siamese", "log_mel", "batch_norm_training", "detection_nms", "constant_output",
    "fixed_reshape", "random_noise",
)  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Models of every verdict that a server loads."""
    folder = tmp_path_factory.mktemp("inspected")
    models: dict[str, onnx.ModelProto] = {one.name: one.model for one in exported()}
    models |= {one.name: one.model for one in cured_models() if one.before != "not loaded"}
    return [*(saved(models[name], name, folder) for name in NAMES), mixing.hashed(folder / "hashed.onnx")]


@pytest.fixture(scope="module")
def inspected(files: list[Path]) -> dict[str, Any]:
    """The verdict of the command on each."""
    done = run_command("inspect", *files, "--json", "--no-measure", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    return {model["name"]: model["batching"] for model in json.loads(done.stdout)["models"]}


def test_the_verdicts_are_the_servers(serve: Serve, inspected: dict[str, Any], files: list[Path]) -> None:
    server = serve(*files, "--device", "cpu")
    with InferenceClient(server.address) as client:
        served = {path.stem: client.metadata(path.stem).properties for path in files}
    assert {name: found["verdict"] for name, found in inspected.items()} == {
        name: properties["batching_verdict"] for name, properties in served.items()
    }
    # The description of this one has random numbers.
    assert {name: found["description"] for name, found in inspected.items() if name != "random_noise"} == {
        name: properties["batching"] for name, properties in served.items() if name != "random_noise"
    }
    assert {found["verdict"] for found in inspected.values()} == {"proved", "tested", "refused", "off"}


_ENDLESS_FUNCTION = """
from tensorferry.serving import FP32, model

@model(inputs={"x": FP32[-1]}, outputs={"y": FP32[-1]})
def endless(x):
    while True:
        pass
"""


@pytest.mark.parametrize(("program", "kind"), [("inspect", "onnx"), ("config", "py"), ("serve", "onnx")])
def test_a_trial_run_that_never_ends_is_named_and_delays_no_exit(
    tmp_path: Path, program: str, kind: str
) -> None:
    path = tmp_path / f"endless.{kind}"
    if kind == "onnx":
        small.endless(path)
    else:
        path.write_text(_ENDLESS_FUNCTION)
    port = ["--port", "0"] if program == "serve" else []
    done = run_command(program, path, "--device", "cpu", "--run-timeout-seconds", "0.1", *port)
    assert done.returncode == 1
    what = "endless.onnx" if kind == "onnx" else "function 'endless'"
    assert f"model 'endless': a trial run of {what} on x [1" in done.stderr
    assert "did not end within 0.1 s, the longest run that --run-timeout-seconds allows" in done.stderr
    assert "Traceback" not in done.stderr
