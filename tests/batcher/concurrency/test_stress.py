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
from support.batcher.rig import PATIENCE, Recorder, figures_add_up, reach

from tensorferry.batcher import Batcher, BatcherClosed, DeadlineExceeded, QueueFull, Request
from tensorferry.batcher.execution.collate import request_of

THREADS, EACH, MAX_BATCH = 8, 250, 6
KINDS = {
    "answered": "answered",
    "ValueError": "failed",
    "Cancelled": "cancelled",
    "DeadlineExceeded": "expired",
    "Shed": "shed",
    "BatcherClosed": "abandoned",
}


def model_fn(x: Any) -> Any:
    """Every row carries its request's tag; tags that end in 13 raise."""
    if (x % 100 == 13).any():
        raise ValueError("poisoned")
    return {"same": x, "double": x * 2}


class Caller:
    """One thread's requests, made from a seed, and the expected outcomes."""

    def __init__(self, batcher: Batcher, number: int, seed: int, half_way: threading.Event) -> None:
        self.batcher = batcher
        self.random = random.Random(seed * 1000 + number)
        self.half_way = half_way
        self.first_tag = number * EACH
        self.sent: list[tuple[int, int, Request, Recorder]] = []
        self.refused = 0

    def run(self) -> None:
        for tag in range(self.first_tag, self.first_tag + EACH):
            if tag == self.first_tag + EACH // 2:
                self.half_way.set()
            rows = self.random.choice([0, 1, 1, 1, 2, 3, 5, 9, 14])
            timeout = self.random.choice([math.inf] * 6 + [0.0, 0.0005, 0.002])
            dtype = self.random.choice([np.int64, np.float32])
            recorder = Recorder()
            request = request_of(
                np.full((rows, 2), tag, dtype), recorder, one_row=False, deadline=time.monotonic() + timeout
            )
            request.priority = self.random.randint(0, self.batcher.priorities)
            try:
                self.batcher.enqueue(request)
            except (QueueFull, DeadlineExceeded, BatcherClosed):
                self.refused += 1
                assert not recorder.outcomes
                continue
            self.sent.append((tag, rows, request, recorder))
            if self.random.random() < 0.2:
                self.batcher.cancel(self.random.choice(self.sent[-4:])[2])

    def check(self) -> None:
        for tag, rows, _, recorder in self.sent:
            if recorder.kind == "answered":
                outputs = recorder.only.outputs
                assert outputs["same"].shape == outputs["double"].shape == (rows, 2)
                assert (outputs["same"] == tag).all()
                assert (outputs["double"] == 2 * tag).all()
                assert tag % 100 != 13 or rows == 0
            elif recorder.kind == "ValueError":
                assert tag % 100 == 13, "failed by a neighbour's fault"
            else:
                assert recorder.kind in KINDS


class Device:
    """A model function that detects two threads in it at once."""

    def __init__(self) -> None:
        self.inside = threading.Semaphore(1)
        self.crowded = False

    def __call__(self, x: Any) -> Any:
        if not self.inside.acquire(blocking=False):
            self.crowded = True
        try:
            return model_fn(x)
        finally:
            self.inside.release()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("delay", "devices", "drain", "options"),
    [
        pytest.param(0.0, 2, True, {}, id="drain"),
        pytest.param(0.0, 1, False, {}, id="close"),
        pytest.param(0.001, 2, True, {}, id="window-drain"),
        pytest.param(0.001, 2, False, {"preferred_batch_sizes": [2, 4]}, id="window-preferred-close"),
        pytest.param(0.0, 1, True, {"pipelined": True}, id="pipelined-drain"),
        pytest.param(0.0, 3, False, {"pipelined": True}, id="pipelined-close"),
        pytest.param(0.0, 1, True, {"priority_weights": (8, 2, 1), "max_queue_size": 30}, id="classes-drain"),
        pytest.param(
            0.0,
            2,
            False,
            {"priority_weights": (4, 1), "max_queue_size": 40, "pipelined": True},
            id="classes-pipelined-close",
        ),
        pytest.param(
            0.001,
            2,
            True,
            {"priority_weights": (1, 1, 1), "max_queue_size": 30, "pipelined": True},
            id="all-drain",
        ),
    ],
)
def test_every_accepted_request_ends_once_with_its_own_outcome(
    seed: int, delay: float, devices: int, drain: bool, options: dict[str, Any]
) -> None:
    functions = [Device() for _ in range(devices)]
    batcher = Batcher(functions, MAX_BATCH, delay, **{"max_queue_size": 2000, **options})
    half_way = threading.Event()
    callers = [Caller(batcher, number, seed, half_way) for number in range(THREADS)]
    with ThreadPoolExecutor(THREADS) as pool:
        running = [pool.submit(caller.run) for caller in callers]
        if not drain:
            # During the load.
            reach(half_way)
            assert batcher.close(drain=False)
        for future in running:
            future.result(PATIENCE)
    assert batcher.close()
    assert not any(function.crowded for function in functions), "one thread at a time"
    for caller in callers:
        caller.check()

    sent = [entry for caller in callers for entry in caller.sent]
    statistics = batcher.statistics()
    assert statistics.accepted == len(sent)
    assert statistics.refused == sum(caller.refused for caller in callers)
    assert statistics.accepted + statistics.refused == THREADS * EACH
    # The statistics count exactly what the callers saw.
    seen = Counter(KINDS[recorder.kind] for *_, recorder in sent)
    assert {kind: getattr(statistics, kind) for kind in KINDS.values()} == {
        kind: seen[kind] for kind in KINDS.values()
    }
    figures_add_up(statistics)
    assert max(statistics.batch_rows, default=0) <= MAX_BATCH
