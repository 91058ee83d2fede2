"""The supervisor's process stays small: it imports nothing that only a server process needs."""

from __future__ import annotations

import os
import subprocess
import sys


def test_what_the_supervisor_imports_is_light() -> None:
    heavy = [
        "grpc",
        "google.protobuf",
        "numpy",
        "onnxruntime",
        "onnx",
        "prometheus_client",
        "tensorferry.batcher",
    ]
    program = (
        "import sys, tensorferry.server.__main__, tensorferry.server.cli.serve\n"
        f"print(*(name for name in {heavy!r} if name in sys.modules))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program]
    found = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    assert not found.split()
