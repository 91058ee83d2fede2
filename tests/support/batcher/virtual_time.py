"""The product's queue in virtual time, with devices whose batches take as long as their rows say."""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

from support.batcher.rig import ignore

from tensorferry.batcher import BatcherError, Request
from tensorferry.batcher.policy.close_rule import Wait
from tensorferry.batcher.queue.request_queue import RequestQueue
from tensorferry.batcher.request import BatchAssignment
from tensorferry.batcher.settings import BatcherSettings
from tensorferry.batcher.testing import VirtualClock

MOST, FIXED, PER_ROW = 32, 0.004, 0.0002
CAPACITY = MOST / (FIXED + PER_ROW * MOST)


@dataclass(frozen=True)
class Sender:
    """A client's traffic, relative to capacity, its timeout (0: none), and its number of kinds."""

    load: float
    timeout: float = 0.04
    kinds: int = 1
    rows: int = 1


def answered(
    senders: Mapping[str, Sender],
    *,
    seconds: float,
    devices: int = 1,
    pipelined: bool = False,
    max_queue_size: int = 4096,
    **options: Any,
) -> Mapping[str, float]:
    """Return the rows in time of each client, relative to the rate of full batches."""
    chance, clock, numbers = random.Random(7), VirtualClock(), count()
    queue = RequestQueue(
        BatcherSettings(MOST, max_queue_size=max_queue_size, devices=devices, pipelined=pipelined, **options),
        clock,
    )
    for rows in (1, MOST):
        queue.learning.add_warmup_sample(rows, FIXED + PER_ROW * rows)
    # Arrivals, batches with the device that ends them, and times at which to look at the queue.
    events: list[tuple[float, int, BatchAssignment | Request | None, int]] = []
    for client, sender in senders.items():
        now = 0.0
        while (now := now + chance.expovariate(sender.load / sender.rows * CAPACITY * devices)) < seconds:
            request = Request(
                (),
                ignore,
                names=None,
                rows=sender.rows,
                nbytes=0,
                key=(client, chance.randrange(sender.kinds)) if sender.kinds > 1 else None,
                deadline=now + sender.timeout if sender.timeout else math.inf,
                client=client,
            )
            heapq.heappush(events, (now, next(numbers), request, -1))
    free, flying, timers = [0.0] * devices, [0] * devices, set[float]()
    got: Counter[str] = Counter()
    while events and events[0][0] < seconds:
        when, _, event, device = heapq.heappop(events)
        clock.advance(when - clock.now())
        if isinstance(event, Request):
            try:
                queue.put([event])
            except BatcherError:
                continue
        elif event is not None:
            flying[device] -= 1
            if pipelined:
                queue.run_done(device)
            for request in queue.finish(event.batch):
                got[request.client] += request.rows if request.deadline > when else 0
            queue.batch_done(event.batch, _batch_seconds(event), device=device)
        for device in range(devices):
            if flying[device] > pipelined:
                continue
            step = queue.poll(device)
            if isinstance(step, BatchAssignment) and step.batch:
                flying[device] += 1
                free[device] = max(clock.now(), free[device]) + _batch_seconds(step)
                heapq.heappush(events, (free[device], next(numbers), step, device))
            elif isinstance(step, BatchAssignment):
                queue.batch_done((), None, device=device)
            elif isinstance(step, Wait) and clock.now() < step.until < seconds and step.until not in timers:
                timers.add(step.until)
                heapq.heappush(events, (step.until, next(numbers), None, -1))
    return {client: got[client] / seconds / CAPACITY / devices for client in senders}


def _batch_seconds(work: BatchAssignment) -> float:
    return FIXED + PER_ROW * sum(request.rows for request in work.batch)
