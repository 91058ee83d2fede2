"""LitServe: HTTP/1.1, JSON with base64."""

from __future__ import annotations

import base64
from typing import Any

import litserve
import numpy as np

from serving.peers.settings import HOST, MAX_BATCH_SIZE, PORT, WINDOW_MS, Engine


class Model(litserve.LitAPI):
    """Model that answers batches."""

    def setup(self, device: str) -> None:
        """Load the model."""
        self.engine = Engine()

    # Without a type annotation, which LitServe would take for the type of the body.
    def decode_request(self, request):  # type: ignore[no-untyped-def]
        """Return the row in a request."""
        return self.engine.array(base64.b64decode(request["b"]), 1)[0]

    def batch(self, inputs: list[Any]) -> Any:
        """Join the rows of a batch."""
        return np.stack(inputs)

    def predict(self, x: Any) -> Any:
        """Run the model."""
        return self.engine.run(x)

    def unbatch(self, output: Any) -> list[Any]:
        """Return each row of the output."""
        return list(output)

    def encode_response(self, output: Any) -> Any:
        """Encode a row of the output for JSON."""
        return {"b": base64.b64encode(output.tobytes()).decode()}


if __name__ == "__main__":
    model = Model(max_batch_size=MAX_BATCH_SIZE, batch_timeout=WINDOW_MS / 1000)
    server = litserve.LitServer(model, accelerator="cpu", workers_per_device=1, fast_queue=True, timeout=60)
    server.run(
        host=HOST,
        port=PORT,
        log_level="warning",
        access_log=False,
        generate_client_file=False,
        num_api_servers=1,
    )
