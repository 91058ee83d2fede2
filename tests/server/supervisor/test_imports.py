"""The supervisor's process stays small: it imports nothing that a front-end or the engine needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

_HEAVY = [
    "grpc",
    "google.protobuf",
    "numpy",
    "onnxruntime",
    "onnx",
    "prometheus_client",
    "tensorferry.batcher",
]


@pytest.mark.parametrize(
    "module",
    [
        "tensorferry.server.__main__",
        "tensorferry.server.config.load",
        "tensorferry.server.config.flags",
        "tensorferry.server.cli.serve",
        "tensorferry.server.supervisor",
        "tensorferry.server.supervisor.log_output",
    ],
)
def test_what_the_supervisor_needs_is_light(module: str) -> None:
    program = (
        f"import json, sys, {module}; print(json.dumps([name for name in {_HEAVY!r} if name in sys.modules]))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    output = subprocess.run(
        [sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True
    ).stdout
    assert json.loads(output) == []
