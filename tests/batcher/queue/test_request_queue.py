"""The queue: admission, expiry, cancellation, and sizes that add up."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import pytest
from support.batcher.rig import PATIENCE, Recorder

from tensorferry.batcher import (
    BatcherClosed,
    CloseReason,
    DeadlineExceeded,
    QueueFull,
    Request,
    RequestTooLarge,
)
from tensorferry.batcher.execution.collate import request_of
from tensorferry.batcher.execution.splitting import split_request
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
    return request_of(np.zeros((rows, width)), Recorder(), one_row=False, deadline=deadline)


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


def test_finishing_gives_the_bytes_back(clock: VirtualClock) -> None:
    queue = make_queue(clock, nbytes=32)
    queue.put([make_request(4)])
    assert len(queue.finish(taken(queue).batch)) == 1
    assert queue.sizes() == EMPTY
    queue.put([make_request(4)])


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


def test_a_request_without_rows_counts_for_one(clock: VirtualClock) -> None:
    """Otherwise a flood of empty requests would be unbounded."""
    queue = make_queue(clock)
    for _ in range(8):
        queue.put([make_request(0)])
    with pytest.raises(QueueFull):
        queue.put([make_request(0)])


def test_the_parts_of_a_request_are_admitted_all_or_none(clock: VirtualClock) -> None:
    queue = make_queue(clock)
    queue.put([make_request(1)])
    parts = split_request(make_request(8), lambda key: 4)
    with pytest.raises(QueueFull):
        queue.put(parts)
    assert queue.sizes() == QueueSizes(1, 1, 0, 8, (1,))
    assert [part.state for part in parts] == [State.NEW, State.NEW]
    assert [len(taken(queue).batch)] == [1]
    queue.put(parts)
    assert queue.sizes() == QueueSizes(2, 8, 1, 72, (8,))


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


def test_expired_requests_are_returned_for_completion_and_forgotten(clock: VirtualClock) -> None:
    queue = make_queue(clock)
    dying, living = make_request(2, deadline=5), make_request(deadline=6)
    queue.put([dying])
    queue.put([living])
    clock.advance(5)
    work = taken(queue)
    assert work.expired == (dying,)
    assert work.batch == (living,)
    assert dying.state is State.DONE
    queue.finish(work.batch)
    assert queue.sizes() == EMPTY


def test_expired_requests_alone_are_handed_out_without_a_batch(clock: VirtualClock) -> None:
    queue = make_queue(clock)
    queue.put([make_request(deadline=5)])
    clock.advance(5)
    work = taken(queue)
    assert (len(work.expired), work.batch, work.reason) == (1, (), None)
    assert queue.sizes() == EMPTY


def test_a_removed_request_does_not_keep_its_deadline(clock: VirtualClock) -> None:
    """The earliest deadline of a bucket may be outdated, but is computed again when it passes."""
    queue = make_queue(clock)
    early, late = make_request(deadline=5), make_request(deadline=7)
    queue.put([early])
    queue.put([late])
    assert queue.cancel([early])
    clock.advance(6)
    queue.put([make_request(deadline=9)])
    clock.advance(1)
    work = taken(queue)
    assert work.expired == (late,)
    assert len(work.batch) == 1


def test_cancel_ends_queued_and_running_requests_only(clock: VirtualClock) -> None:
    queue = make_queue(clock)
    new, queued, running, finished = (make_request() for _ in range(4))
    assert not queue.cancel([new])
    queue.put([finished])
    queue.finish(taken(queue).batch)
    assert not queue.cancel([finished])
    queue.put([running])
    batch = taken(queue).batch
    queue.put([queued])
    assert queue.sizes() == QueueSizes(1, 1, 1, 16, (1,))
    assert queue.cancel([running])
    assert queue.cancel([queued])
    assert not queue.cancel([running])
    assert not queue.cancel([queued])
    assert queue.sizes() == EMPTY
    assert queue.still_running(batch) == []
    assert queue.finish(batch) == []
    assert queue.sizes() == EMPTY


def test_abandon_fails_queued_and_keeps_running_requests(clock: VirtualClock) -> None:
    queue = make_queue(clock)
    running, queued = make_request(), make_request()
    queue.put([running])
    batch = taken(queue).batch
    queue.put([queued])
    queue.close()
    assert queue.fail_all() == [queued]
    assert queue.fail_all() == []
    assert queue.sizes() == QueueSizes(0, 0, 1, 8, (0,))
    assert queue.finish(batch) == [running]
    assert queue.take() is None


def test_drained_only_once_the_worker_has_completed_its_batch(clock: VirtualClock) -> None:
    queue = make_queue(clock)
    assert queue.wait_drained(clock.now())
    queue.put([make_request()])
    assert not queue.wait_drained(clock.now())
    queue.finish(taken(queue).batch)
    assert not queue.wait_drained(clock.now()), "finished, but its completion may still be to come"
    queue.batch_done((), None)
    assert queue.wait_drained(clock.now())


def test_a_batch_is_of_one_bucket_and_in_order_of_arrival(clock: VirtualClock) -> None:
    queue = make_queue(clock)
    kinds = [1, 2, 1, 1, 2]
    requests = [make_request(width=width) for width in kinds]
    for request in requests:
        queue.put([request])
        clock.advance(1)
    assert taken(queue).batch == (requests[0], requests[2], requests[3])
    assert taken(queue).batch == (requests[1], requests[4])
