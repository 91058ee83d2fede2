"""Batches are short where the least patient could not ride behind a full one, as long as that keeps up."""

from __future__ import annotations

import pytest
from batcher.queue.test_overload_control import FULL, MOST, Door

from tensorferry.batcher.queue.request_queue import RequestQueue
from tensorferry.batcher.settings import BatcherSettings

# Less than a full batch takes and its own row.
IMPATIENT = 1.05 * FULL


def queue_up(door: Door, load: float) -> None:
    """As many come as three full batches take, none of them impatient, at a share of what the device gets done."""
    for _ in range(3 * MOST):
        door.clock.advance(FULL / MOST / load)
        assert door.offer(5.0)


def test_a_batch_is_short_where_somebody_impatient_may_come() -> None:
    door = Door()
    assert door.offer(IMPATIENT)
    door.run()
    queue_up(door, 0.9)
    assert door.start() == 5, "what runs as one comes and its own batch take no longer than it has"


def test_a_batch_is_full_where_all_are_patient() -> None:
    door = Door()
    queue_up(door, 0.9)
    assert door.start() == MOST


def test_a_batch_is_full_where_more_comes_than_short_ones_keep_up_with() -> None:
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
        # Here a third of it is fixed.
        door.queue.add_warmup_sample(rows, 0.3 * FULL + 0.7 * FULL * rows / MOST)
    assert door.offer(IMPATIENT)
    queue_up(door, 0.5)
    assert door.start() == MOST


@pytest.mark.parametrize("batches", [3, 300])
def test_who_has_not_come_for_long_is_forgotten(batches: int) -> None:
    door = Door()
    assert door.offer(IMPATIENT)
    for _ in range(batches):
        door.run()
        door.clock.advance(FULL)
        assert door.offer(5.0)
    door.run()
    queue_up(door, 0.9)
    assert door.start() == (5 if batches < 100 else MOST)
