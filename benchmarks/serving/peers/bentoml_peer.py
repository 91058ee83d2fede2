"""BentoML: HTTP/1.1, JSON with base64 (its server refuses pickle), its adaptive dispatcher."""

# No `from __future__ import annotations`, because BentoML reads the annotations.
import base64

import bentoml

from serving.peers.settings import MAX_BATCH_SIZE, Engine

_LATENCY_MS = 60_000  # The dispatcher rejects requests that it expects to take longer.


@bentoml.service(
    workers=1, traffic={"timeout": 60}, logging={"access": {"enabled": False}}, metrics={"enabled": False}
)
class Model:
    """Model that answers batches."""

    def __init__(self) -> None:
        self.engine = Engine()

    @bentoml.api(batchable=True, max_batch_size=MAX_BATCH_SIZE, max_latency_ms=_LATENCY_MS)
    def predict(self, rows: list[str]) -> list[str]:
        """Return base64 for each row."""
        outputs = self.engine.run_bytes([base64.b64decode(row) for row in rows])
        return [base64.b64encode(output).decode() for output in outputs]
