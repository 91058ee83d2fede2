"""Priority classes through the public API: order, displacement, and errors for a wrong class."""

from __future__ import annotations

import numpy as np
import pytest
from batcher.conftest import Busy, Make
from support.batcher.rig import enqueue, error, result, results, rows

from tensorferry.batcher import InvalidRequest, Shed
from tensorferry.batcher.testing import VirtualClock


def test_while_all_are_backlogged_rows_are_shared_by_weight(busy: Busy, clock: VirtualClock) -> None:
    # On the real clock, batches that take long make the batcher try smaller ones.
    batcher, runner = busy(None, 8, priority_weights=(5, 2, 1), clock=clock)
    futures = [batcher.submit(float(priority), priority=priority) for priority in (3, 2, 1) * 40]
    runner.open()
    results(futures)
    backlogged = runner.batches[1:8]
    assert [sum(int((batch == tag).sum()) for batch in backlogged) for tag in (1, 2, 3)] == [35, 14, 7]


@pytest.mark.parametrize(("default", "ride"), [(0, [1, 1, 9, 9]), (1, [9, 9, 1, 1]), (2, [1, 1, 9, 9])])
def test_the_default_class_is_the_lowest(busy: Busy, default: int, ride: list[float]) -> None:
    batcher, runner = busy(None, 4, priority_weights=(1, 1), default_priority=default)
    futures = [batcher.submit(9.0) for _ in range(2)]
    futures += [batcher.submit(1.0, priority=1 if default != 1 else 2) for _ in range(2)]
    runner.open()
    results(futures)
    assert rows(runner, 1) == [ride]


def test_the_parts_of_a_split_request_are_of_its_class(busy: Busy) -> None:
    """Otherwise they would overtake all other requests."""
    batcher, runner = busy(None, 2, priority_weights=(1, 1))
    large = batcher.submit_rows(np.full(6, 9.0), priority=2)
    assert batcher.statistics().sizes.class_rows == (0, 6)
    small = batcher.submit_rows(np.full(2, 1.0), priority=1)
    runner.open()
    result(large)
    result(small)
    assert 1.0 in rows(runner, 1)[0], "the higher class leads the next batch"


@pytest.mark.parametrize("priority", [-1, 3])
def test_a_class_that_does_not_exist_is_refused(make: Make, priority: int) -> None:
    batcher = make(lambda x: x, priority_weights=(1, 1))
    with pytest.raises(InvalidRequest, match=rf"priority is {priority}; it must be from 1, .* to 2"):
        batcher.submit(1.0, priority=priority)
    assert batcher.statistics().refused == 1


def test_a_full_queue_displaces_the_last_of_lower_classes(busy: Busy) -> None:
    batcher, runner = busy(None, 4, max_queue_size=4, priority_weights=(1, 1, 1))
    middle = [batcher.submit(float(tag), priority=2) for tag in (21, 22)]
    low = [batcher.submit(float(tag), priority=3) for tag in (31, 32)]
    high = batcher.submit(10.0, priority=1)
    failure = error(low[1])
    assert isinstance(failure, Shed), "the newest of the lowest class"
    assert "higher class" in str(failure)
    assert failure.retry_after > 0
    assert not any(future.done() for future in [*middle, low[0]])
    assert batcher.statistics().shed == 1
    runner.open()
    assert [result(future) for future in [*middle, low[0], high]] == [42, 44, 62, 20]


def test_a_split_request_with_a_dropped_part_ends_once(busy: Busy) -> None:
    batcher, runner = busy(None, 2, max_queue_size=6, priority_weights=(1, 1))
    _, recorder = enqueue(batcher, np.zeros(6), priority=2)
    _, high = enqueue(batcher, np.ones(1), priority=1)
    assert recorder.kind == "Shed"
    sizes = batcher.statistics().sizes
    assert (sizes.queued, sizes.queued_rows, sizes.class_rows) == (1, 1, (1, 0))
    runner.open()
    assert batcher.close()
    assert recorder.kind == "Shed"
    assert high.kind == "answered"
    statistics = batcher.statistics()
    assert (statistics.shed, statistics.cancelled, statistics.answered) == (1, 0, 2)
