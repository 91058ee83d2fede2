"""Batches that the polling thread runs itself."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from tensorferry.batcher import Batcher, Request

# Waking a worker takes about as long as a batch of this duration, and the two threads would contend for the GIL.
_MAX_RUN_SECONDS = 200e-6

# Every wake-up is due sooner, unless the system clock was set back.
_MAX_WAIT_SECONDS = 5.0


class InlineRuns:
    """The batchers that wait for the polling thread to run their next batch. For the polling thread.

    `wake_soon` makes that thread call `run` once it has handled the events that are there.
    """

    def __init__(self, wake_soon: Callable[[], None]) -> None:
        self._wake_soon = wake_soon
        # Batchers that accepted requests since the last `run`.
        self._pending: set[Batcher] = set()
        # Batchers that wait for callers to return, with the time of their next run in seconds since the epoch.
        self._next_run: dict[Batcher, float] = {}

    def enqueue(self, batcher: Batcher, request: Request) -> None:
        """Enqueue a request without waking a worker for it. Raises as `Batcher.enqueue` does."""
        if batcher.enqueue(request, notify=False):
            self._pending.add(batcher)
            self._wake_soon()

    def run(self, now: float) -> float:
        """Run every short batch that is due; return when the next is due. Both times are seconds since the epoch."""
        for batcher, when in list(self._next_run.items()):
            if when <= now or when > now + _MAX_WAIT_SECONDS:
                del self._next_run[batcher]
                self._pending.add(batcher)
        while self._pending:
            batcher = self._pending.pop()
            again = batcher.run_inline(_MAX_RUN_SECONDS)
            if again < math.inf:
                self._next_run[batcher] = time.time() + again - time.monotonic()
        return min(self._next_run.values(), default=math.inf)
