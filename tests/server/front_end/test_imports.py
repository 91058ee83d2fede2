"""A front-end's process starts fast and stays small: it imports neither numpy, nor what runs batches or models."""

from __future__ import annotations

import json
import os
import subprocess
import sys

_UNUSED = [
    "numpy",
    "onnx",
    "onnxruntime",
    "tensorferry.batcher.batcher",
    "tensorferry.server.inference.service",
    "tensorferry.server.models",
]
# What is imported at the start, and with the self-test.
_PROGRAM = f"""
import json, sys
import tensorferry.server.front_end.process
import tensorferry.server.transport.lane.selftest
print(json.dumps([name for name in {_UNUSED!r} if name in sys.modules]))
"""


def test_what_a_front_end_does_not_use_is_not_imported() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    output = subprocess.run(
        [sys.executable, "-c", _PROGRAM], env=environment, check=True, capture_output=True, text=True
    ).stdout
    assert json.loads(output) == []
