"""The queue: admission, expiry, cancellation, and sizes that add up."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import pytest
from support.batcher.rig import PATIENCE, Recorder, new_request

from tensorferry.batcher import (
    BatcherClosed,
    CloseReason,
    DeadlineExceeded,
    QueueFull,
    Request,
    RequestTooLarge,
)
from tensorferry.batcher.queue.request_queue import RequestQueue
from tensorferry.batcher.request import State
from tensorferry.batcher.settings import BatcherSettings
from tensorferry.batcher.statistics.counters import QueueSizes
from tensorferry.batcher.testing import VirtualClock

EMPTY = QueueSizes(queued=0, queued_rows=0, running=0, held_bytes=0)


def make_queue(
    clock: VirtualClock, *, size: int = 4, window: float = 0.0, rows: int = 8, nbytes: int = 1000
) -> RequestQueue:
    return RequestQueue(BatcherSettings(size, window, max_queue_size=rows, max_queue_bytes=nbytes), clock)


def make_request(rows: int = 1, *, deadline: float = math.inf, width: int = 1) -> Request:
    """Return a request of `rows` × `width` float64."""
    return new_request(np.zeros((rows, width)), Recorder(), deadline=deadline)


def taken(queue: RequestQueue) -> Any:
    work = queue.take()
    assert work is not None
    return work


def test_bounds_the_rows_that_wait(clock: VirtualClock) -> None:
    queue = make_queue(clock)
    for _ in range(4):
        queue.put([make_request(2)])
    refused = make_request()
    with pytest.raises(QueueFull, match=r"8 of 8 rows wait, the request has 1; retry in 0\.001 s") as caught:
        queue.put([refused])
    assert caught.value.retry_after == 0.001
    assert queue.sizes() == QueueSizes(4, 8, 0, 64, (8,))
    assert refused.state is State.NEW


def test_running_requests_free_rows_but_not_bytes(clock: VirtualClock) -> None:
    """The bound on rows counts queued requests; the bound on bytes also counts running ones."""
    queue = make_queue(clock, nbytes=64)
    for _ in range(8):
        queue.put([make_request()])
    taken(queue)
    assert queue.sizes() == QueueSizes(4, 4, 4, 64, (4,))
    with pytest.raises(QueueFull, match="it holds 64 of 64 bytes, the request has 8"):
        queue.put([make_request()])
    queue.put([make_request(width=0)])


@pytest.mark.parametrize(
    ("rows", "width", "message"),
    [(9, 1, "has 9 rows; the queue holds 8"), (8, 99, "has 6336 bytes; the queue holds 1000")],
)
def test_a_request_that_can_never_fit_is_too_large(
    clock: VirtualClock, rows: int, width: int, message: str
) -> None:
    queue = make_queue(clock)
    with pytest.raises(RequestTooLarge, match=message):
        queue.put([make_request(rows, width=width)])
    assert queue.sizes() == EMPTY


def test_the_parts_of_a_request_are_admitted_by_the_times_of_their_buckets(clock: VirtualClock) -> None:
    queue = make_queue(clock, rows=20)
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


def test_a_closing_queue_accepts_nothing_and_hands_out_the_rest(clock: VirtualClock) -> None:
    queue = make_queue(clock, window=10)
    queue.put([make_request()])
    queue.close()
    queue.close()
    with pytest.raises(BatcherClosed):
        queue.put([make_request()])
    work = taken(queue)
    assert (len(work.batch), work.reason) == (1, CloseReason.DRAIN)
    assert queue.take() is None
