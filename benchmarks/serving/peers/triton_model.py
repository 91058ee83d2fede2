"""Model of Triton's Python backend, inside its stub process."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

# The stub ignores PYTHONPATH.
sys.path[:0] = os.environ["SERVING_BENCH_PATHS"].split(os.pathsep)

import numpy as np
import triton_python_backend_utils as backend

from serving.peers.settings import Engine


class TritonPythonModel:
    """Model with Triton's interface: requests of a batch are joined, run and split."""

    def initialize(self, args: Any) -> None:
        """Load the model."""
        path = json.loads(args["model_config"])["parameters"]["path"]["string_value"]
        self.engine = Engine(Path(path))

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer a batch."""
        name = self.engine.input.name
        parts = [backend.get_input_tensor_by_name(request, name).as_numpy() for request in requests]
        rows = self.engine.run(np.concatenate(parts) if len(parts) > 1 else parts[0])
        responses, at = [], 0
        for part in parts:
            output = backend.Tensor(self.engine.output.name, rows[at : at + len(part)])
            responses.append(backend.InferenceResponse([output]))
            at += len(part)
        return responses
