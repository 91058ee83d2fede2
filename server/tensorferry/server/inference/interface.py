"""What the inference service and the transports share."""

from __future__ import annotations

from typing import Protocol

SHUTTING_DOWN = "the server is shutting down and has stopped accepting new requests; retry elsewhere"

# Seconds that a batch may take on a thread which serves all calls. Waking a worker takes about as long, and the two threads
# would contend for the GIL.
MAX_INLINE_SECONDS = 200e-6


class InlineRunner(Protocol):
    """A batcher or a pipeline that a thread which serves all calls must run soon."""

    def run_inline(self, max_seconds: float) -> float:
        """See `Batcher.run_inline`."""
