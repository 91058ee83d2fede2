"""Batches stay short if a request with a tight deadline could not wait for a full one, as long as
throughput suffices.
"""

from __future__ import annotations

import pytest
from batcher.queue.test_overload_control import FULL, MOST, QueueUnderLoad

from tensorferry.batcher.queue.request_queue import RequestQueue
from tensorferry.batcher.settings import BatcherSettings

# Shorter than a full batch and a batch of one.
IMPATIENT = 1.05 * FULL


def queue_up(queue: QueueUnderLoad, load: float) -> None:
    """Enqueue the rows of three full batches, with loose deadlines, at a share of the device's rate."""
    for _ in range(3 * MOST):
        queue.clock.advance(FULL / MOST / load)
        assert queue.offer(5.0)


def test_a_batch_is_short_if_tight_deadlines_arrive() -> None:
    queue = QueueUnderLoad()
    assert queue.offer(IMPATIENT)
    queue.run()
    queue_up(queue, 0.9)
    assert queue.start() == 5, "what runs as one comes and its own batch take no longer than it has"


def test_a_batch_is_full_if_all_deadlines_are_loose() -> None:
    queue = QueueUnderLoad()
    queue_up(queue, 0.9)
    assert queue.start() == MOST


def test_a_batch_is_full_if_short_ones_cannot_keep_up() -> None:
    queue = QueueUnderLoad()
    assert queue.offer(IMPATIENT)
    queue.run()
    queue_up(queue, 3.0)
    assert queue.start() == MOST


def test_a_batch_is_full_where_short_ones_cost_much() -> None:
    queue = QueueUnderLoad()
    queue.inner = RequestQueue(BatcherSettings(MOST), queue.clock)
    for rows in (1, MOST):
        # A third of the batch time is fixed.
        queue.inner.learning.add_warmup_sample(rows, 0.3 * FULL + 0.7 * FULL * rows / MOST)
    assert queue.offer(IMPATIENT)
    queue_up(queue, 0.5)
    assert queue.start() == MOST


@pytest.mark.parametrize("batches", [3, 300])
def test_an_inactive_client_is_forgotten(batches: int) -> None:
    queue = QueueUnderLoad()
    assert queue.offer(IMPATIENT)
    for _ in range(batches):
        queue.run()
        queue.clock.advance(FULL)
        assert queue.offer(5.0)
    queue.run()
    queue_up(queue, 0.9)
    assert queue.start() == (5 if batches < 100 else MOST)
