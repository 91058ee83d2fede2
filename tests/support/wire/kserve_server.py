"""KServe's Python server with two models, for test_foreign_servers.py; it runs in KServe's environment.

The arguments are the ports of gRPC and HTTP.
"""

from __future__ import annotations

import sys
from typing import Any

from kserve import InferOutput, InferRequest, InferResponse, Model, ModelServer


class Undeclared(Model):
    """Model that answers y = 2 x, and does not name its inputs and outputs."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.ready = True

    def predict(
        self, payload: InferRequest, headers: Any = None, response_headers: Any = None
    ) -> InferResponse:
        """Double the only input."""
        x = payload.inputs[0].as_numpy()
        y = InferOutput("y", list(x.shape), payload.inputs[0].datatype)
        y.set_data_from_numpy(2 * x)
        return InferResponse(payload.id, self.name, [y])


class Declared(Undeclared):
    """The same, with names."""

    def get_input_types(self) -> list[dict[str, Any]]:
        """Return the input."""
        return [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}]

    def get_output_types(self) -> list[dict[str, Any]]:
        """Return the output."""
        return [{"name": "y", "datatype": "FP32", "shape": [-1, 3]}]


if __name__ == "__main__":
    server = ModelServer(grpc_port=int(sys.argv[1]), http_port=int(sys.argv[2]), enable_grpc=True, workers=1)
    server.start([Declared("double"), Undeclared("undeclared")])
