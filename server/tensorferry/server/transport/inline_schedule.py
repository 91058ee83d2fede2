"""The schedule of batches that a transport's polling thread runs itself."""

from __future__ import annotations

import math
import time

from tensorferry.server.inference.reply import MAX_INLINE_SECONDS, InlineRunner


class InlineSchedule:
    """The batchers whose next batch one polling thread runs. Every polling thread has its own; no other may use it.

    The thread enqueues the requests of all events that wait, and calls `run_soon` for each batcher that asks for it. Then,
    when no event is left, it calls `run_due`, which is cheaper than waking a worker for each request.
    """

    def __init__(self) -> None:
        # When to run each batcher's next batch, on the clock of `time.monotonic`: at once (0), or when it stops waiting for
        # clients that were just answered.
        self._run_at: dict[InlineRunner, float] = {}

    def run_soon(self, batcher: InlineRunner) -> None:
        """Run a batcher's next batch at the next `run_due`."""
        self._run_at[batcher] = 0.0

    def run_due(self) -> float:
        """Run the batches that are due, and return in how many seconds to call this again; inf for never."""
        if not self._run_at:
            return math.inf
        now = time.monotonic()
        for batcher, when in list(self._run_at.items()):
            if when <= now:
                del self._run_at[batcher]
                again = batcher.run_inline(MAX_INLINE_SECONDS)
                if again < math.inf:
                    self._run_at[batcher] = again
        return max(0.0, min(self._run_at.values(), default=math.inf) - time.monotonic())
