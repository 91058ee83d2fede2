"""The record of what the parts of the execution share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tensorferry.batcher.clock import Clock
from tensorferry.batcher.execution.completion import RequestCompleter
from tensorferry.batcher.queue.request_queue import RequestQueue
from tensorferry.batcher.request import Request
from tensorferry.batcher.settings import BatcherSettings
from tensorferry.batcher.statistics.counters import Counters
from tensorferry.batcher.statistics.recent_batches import RecentBatches

# Called with an instance's index when a worker of it crashed: with the reason, and whether only a restart of the process
# can help; and with None as the reason when it works again.
InstanceHealthCallback = Callable[[int, str | None, bool], None]

# Called with the requests of a batch, or of a part that runs again, before they are joined and run. Must not raise or block.
BatchStartCallback = Callable[[Sequence[Request]], Callable[[], None] | None]


@dataclass(frozen=True, slots=True)
class ExecutionContext:
    """Objects shared by the workers of one batcher. `name` is the batcher's, for log lines and thread names."""

    settings: BatcherSettings
    queue: RequestQueue
    completer: RequestCompleter
    counters: Counters
    recent: RecentBatches
    clock: Clock
    name: str
    health: InstanceHealthCallback
    batch_started: BatchStartCallback | None
