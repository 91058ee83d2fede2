"""How the parts of a batcher are put together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tensorferry.batcher.clock import Clock
from tensorferry.batcher.entry import Entry
from tensorferry.batcher.execution.completion import RequestCompleter, ResponseBurstHook
from tensorferry.batcher.execution.context import ExecutionContext, InstanceHealthCallback
from tensorferry.batcher.execution.instance import Instance
from tensorferry.batcher.execution.worker_pool import WorkerPool
from tensorferry.batcher.queue.request_queue import RequestQueue
from tensorferry.batcher.settings import BatcherSettings
from tensorferry.batcher.statistics.counters import Counters
from tensorferry.batcher.statistics.recent_batches import RecentBatches

_log = logging.getLogger("tensorferry.batcher")


@dataclass(frozen=True, slots=True)
class Parts:
    """What a batcher is made of; its workers run. `warnings` say which of its settings can have no effect."""

    queue: RequestQueue
    entry: Entry
    completer: RequestCompleter
    workers: WorkerPool
    counters: Counters
    recent: RecentBatches
    warnings: Sequence[str]


def put_together(
    settings: BatcherSettings,
    functions: Sequence[Callable[[Any], Any]],
    clock: Clock,
    name: str,
    *,
    together: ResponseBurstHook | None,
    health: InstanceHealthCallback,
) -> Parts:
    """The parts of a batcher with these settings and functions."""
    batched = settings.max_batch_size > 0
    queue = RequestQueue(settings, clock)
    counters, recent = Counters(), RecentBatches(clock)
    completer = RequestCompleter(counters, clock, name, queue.last_response, recent, together)
    entry = Entry(settings, queue, completer, counters, clock, name)
    warnings = tuple(settings.warnings())
    for warning in warnings:
        _log.warning("%s: %s", name, warning)
    instances = [
        Instance(
            index,
            function,
            batched=batched,
            pipelined=settings.pipelined,
            divisible=batched and settings.merge,
        )
        for index, function in enumerate(functions)
    ]
    workers = WorkerPool(instances, ExecutionContext(queue, completer, counters, recent, clock, name, health))
    return Parts(queue, entry, completer, workers, counters, recent, warnings)
