"""The queue without a batcher: its bounds, and the parts of a request."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import pytest
from support.batcher.rig import PATIENCE, new_request

from tensorferry.batcher import BatcherClosed, DeadlineExceeded, QueueFull, Request
from tensorferry.batcher.queue.request_queue import RequestQueue
from tensorferry.batcher.request import BatchAssignment
from tensorferry.batcher.settings import BatcherSettings
from tensorferry.batcher.statistics.counters import QueueSizes
from tensorferry.batcher.testing import VirtualClock


def make_queue(clock: VirtualClock, **options: Any) -> RequestQueue:
    return RequestQueue(BatcherSettings(4, **options), clock)


def make_request(rows: int = 1, *, deadline: float = math.inf, width: int = 1) -> Request:
    """Return a request of `rows` × `width` float64."""
    return new_request(np.zeros((rows, width)), deadline=deadline)


def taken(queue: RequestQueue) -> BatchAssignment:
    work = queue.take()
    assert isinstance(work, BatchAssignment)
    return work


def test_running_requests_free_rows_but_not_bytes(clock: VirtualClock) -> None:
    """The bound on rows counts queued requests; the bound on bytes also counts running ones."""
    queue = make_queue(clock, max_queue_bytes=64)
    for _ in range(8):
        queue.put([make_request()])
    taken(queue)
    assert queue.sizes() == QueueSizes(4, 4, 4, 64, (4,))
    with pytest.raises(QueueFull, match="it holds 64 of 64 bytes, the request has 8"):
        queue.put([make_request()])
    queue.put([make_request(width=0)])


def test_the_parts_of_a_request_are_admitted_by_the_times_of_their_buckets(clock: VirtualClock) -> None:
    queue = make_queue(clock)
    for width, seconds in ((1, 0.1), (2, 1.0)):
        queue.put([make_request(width=width)])
        work = taken(queue)
        clock.advance(seconds)
        queue.finish(work.batch)
        queue.batch_done(work.batch, seconds)

    def parts(deadline: float) -> list[Request]:
        return [make_request(rows, width=width, deadline=deadline) for width, rows in ((2, 1), (1, 4))]

    with pytest.raises(DeadlineExceeded):
        queue.put(parts(clock.now() + 0.5))
    queue.put(parts(clock.now() + 2.0))


def test_a_worker_wakes_for_each_bucket_of_a_request(clock: VirtualClock) -> None:
    queue = make_queue(clock)
    batches: list[int] = []
    worker = threading.Thread(
        target=lambda: batches.extend(taken(queue).batch[0].rows for _ in range(2)), daemon=True
    )
    worker.start()
    clock.await_sleepers()
    queue.put([make_request(2, width=2), make_request(width=1)])
    worker.join(PATIENCE)
    assert batches == [2, 1]


def test_close_ends_the_window_of_a_waiting_worker(clock: VirtualClock) -> None:
    queue = make_queue(clock, max_queue_delay=60.0)
    batches: list[int] = []
    worker = threading.Thread(target=lambda: batches.append(len(taken(queue).batch)), daemon=True)
    queue.put([make_request()])
    worker.start()
    clock.await_sleepers()
    queue.close()
    worker.join(PATIENCE)
    assert batches == [1]


def test_a_device_that_recovers_opens_no_closed_queue(clock: VirtualClock) -> None:
    queue = make_queue(clock)
    queue.close()
    queue.failures.recovered(0)
    with pytest.raises(BatcherClosed):
        queue.put([make_request()])
