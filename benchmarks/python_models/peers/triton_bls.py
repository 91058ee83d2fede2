"""Model of Triton's Python backend that calls two others: business logic scripting (BLS).

The requests of a batch are joined, so that each of the two models is called once for a batch.
"""

from __future__ import annotations

import os
import sys
from typing import Any

# The stub ignores PYTHONPATH.
sys.path[:0] = os.environ["SERVING_BENCH_PATHS"].split(os.pathsep)

import numpy as np
import triton_python_backend_utils as backend


def called(model: str, rows: Any) -> Any:
    """Return another model's output."""
    request = backend.InferenceRequest(
        model_name=model, requested_output_names=["y"], inputs=[backend.Tensor("x", rows)]
    )
    response = request.exec()
    if response.has_error():
        raise backend.TritonModelException(response.error().message())
    return backend.get_output_tensor_by_name(response, "y").as_numpy()


class TritonPythonModel:
    """Model with Triton's interface."""

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer a batch."""
        parts = [backend.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        hidden = called("first", np.concatenate(parts) if len(parts) > 1 else parts[0])
        # Here the empty step would be.
        rows = called("second", hidden)
        responses, at = [], 0
        for part in parts:
            responses.append(backend.InferenceResponse([backend.Tensor("y", rows[at : at + len(part)])]))
            at += len(part)
        return responses
