"""Many threads, random sizes, classes, cancels, deadlines and failures: nothing is lost, doubled or
mixed up.

Properties 1, 2, 3 and 12 on real threads.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from support.batcher.rig import PATIENCE, Recorder, figures_add_up, new_request, reach

from tensorferry.batcher import Batcher, BatcherClosed, DeadlineExceeded, QueueFull, Request

THREADS, EACH, MAX_BATCH = 8, 200, 6
KINDS = {
    "answered": "answered",
    "ValueError": "failed",
    "Cancelled": "cancelled",
    "DeadlineExceeded": "expired",
    "Shed": "shed",
    "BatcherClosed": "abandoned",
}


class Device:
    """A function whose rows carry their request's tag. Tags that end in 13 raise. It detects two threads in it at once."""

    def __init__(self) -> None:
        self.inside = threading.Semaphore(1)
        self.crowded = False

    def __call__(self, x: Any) -> Any:
        if not self.inside.acquire(blocking=False):
            self.crowded = True
        try:
            if (x % 100 == 13).any():
                raise ValueError("poisoned")
            return {"same": x, "double": x * 2}
        finally:
            self.inside.release()


def call(batcher: Batcher, number: int, half_way: threading.Event) -> list[tuple[Request, Recorder]]:
    """Send the requests of a thread, and cancel some; return those that were accepted."""
    chance, sent = random.Random(number), list[tuple[Request, Recorder]]()
    for at in range(EACH):
        if at == EACH // 2:
            half_way.set()
        tag, dtype = number * EACH + at, chance.choice([np.int64, np.float32])
        timeout = chance.choice([math.inf] * 6 + [0.0, 0.0005, 0.002])
        x = np.full((chance.choice([0, 1, 1, 1, 2, 3, 5, 9, 14]), 2), tag, dtype)
        recorder, priority = Recorder(), chance.randint(0, batcher.priorities)
        request = new_request(
            x, recorder, deadline=time.monotonic() + timeout, priority=priority, tag=str(tag)
        )
        try:
            batcher.enqueue(request)
        except (QueueFull, DeadlineExceeded, BatcherClosed):
            assert not recorder.outcomes
            continue
        sent.append((request, recorder))
        if chance.random() < 0.2:
            batcher.cancel(chance.choice(sent[-4:])[0])
    return sent


def check(request: Request, recorder: Recorder) -> None:
    tag = int(str(request.tag))
    assert recorder.kind in KINDS
    if recorder.kind == "answered":
        outputs = recorder.only.outputs
        assert outputs["same"].shape == outputs["double"].shape == (request.rows, 2)
        assert (outputs["same"] == tag).all()
        assert (outputs["double"] == 2 * tag).all()
        assert tag % 100 != 13 or request.rows == 0
    assert recorder.kind != "ValueError" or tag % 100 == 13, "failed by a neighbour's fault"


@pytest.mark.parametrize("drain", [True, False])
@pytest.mark.parametrize(
    ("delay", "devices", "options"),
    [
        (0.001, 2, {}),
        (0.0, 1, {"priority_weights": (8, 2, 1), "max_queue_size": 30}),
        (0.0, 3, {"priority_weights": (4, 1), "max_queue_size": 40, "pipelined": True}),
    ],
    ids=["window", "classes", "pipelined"],
)
def test_every_accepted_request_ends_once_with_its_own_outcome(
    delay: float, devices: int, drain: bool, options: dict[str, Any]
) -> None:
    functions, half_way = [Device() for _ in range(devices)], threading.Event()
    batcher = Batcher(functions, MAX_BATCH, delay, **{"max_queue_size": 2000, **options})
    with ThreadPoolExecutor(THREADS) as pool:
        running = [pool.submit(call, batcher, number, half_way) for number in range(THREADS)]
        if not drain:
            # During the load.
            reach(half_way)
            assert batcher.close(drain=False)
        sent = [each for future in running for each in future.result(PATIENCE)]
    assert batcher.close()
    assert not any(function.crowded for function in functions), "one thread at a time"
    for request, recorder in sent:
        check(request, recorder)
    statistics = batcher.statistics()
    assert (statistics.accepted, statistics.refused) == (len(sent), THREADS * EACH - len(sent))
    # The statistics count exactly what the callers saw.
    seen = Counter(KINDS[recorder.kind] for _, recorder in sent)
    assert {kind: getattr(statistics, kind) for kind in KINDS.values()} == {
        kind: seen[kind] for kind in KINDS.values()
    }
    figures_add_up(statistics)
    assert max(statistics.batch_rows, default=0) <= MAX_BATCH
