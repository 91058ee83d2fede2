"""Batches stay short if a request with a tight deadline could not wait for a full one, as long as
throughput suffices.
"""

from __future__ import annotations

import pytest
from batcher.queue.test_overload_control import FULL, MOST, Door

from tensorferry.batcher.queue.request_queue import RequestQueue
from tensorferry.batcher.settings import BatcherSettings

# Shorter than a full batch and a batch of one.
IMPATIENT = 1.05 * FULL


def queue_up(door: Door, load: float) -> None:
    """Enqueue the rows of three full batches, with loose deadlines, at a share of the device's rate."""
    for _ in range(3 * MOST):
        door.clock.advance(FULL / MOST / load)
        assert door.offer(5.0)


def test_a_batch_is_short_if_tight_deadlines_arrive() -> None:
    door = Door()
    assert door.offer(IMPATIENT)
    door.run()
    queue_up(door, 0.9)
    assert door.start() == 5, "what runs as one comes and its own batch take no longer than it has"


def test_a_batch_is_full_if_all_deadlines_are_loose() -> None:
    door = Door()
    queue_up(door, 0.9)
    assert door.start() == MOST


def test_a_batch_is_full_if_short_ones_cannot_keep_up() -> None:
    door = Door()
    assert door.offer(IMPATIENT)
    door.run()
    queue_up(door, 3.0)
    assert door.start() == MOST


def test_a_batch_is_full_where_short_ones_cost_much() -> None:
    door = Door()
    door.queue = RequestQueue(
        BatcherSettings(MOST, 0.0, max_queue_size=4096, max_queue_bytes=1 << 30), door.clock
    )
    for rows in (1, MOST):
        # A third of the batch time is fixed.
        door.queue.add_warmup_sample(rows, 0.3 * FULL + 0.7 * FULL * rows / MOST)
    assert door.offer(IMPATIENT)
    queue_up(door, 0.5)
    assert door.start() == MOST


@pytest.mark.parametrize("batches", [3, 300])
def test_an_inactive_client_is_forgotten(batches: int) -> None:
    door = Door()
    assert door.offer(IMPATIENT)
    for _ in range(batches):
        door.run()
        door.clock.advance(FULL)
        assert door.offer(5.0)
    door.run()
    queue_up(door, 0.9)
    assert door.start() == (5 if batches < 100 else MOST)
