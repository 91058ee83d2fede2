"""When a batch closes and which requests are in it, through the public API, with a stopped clock."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from batcher.conftest import Busy, Make
from support.batcher.rig import PATIENCE, new_request, result, results, rows

from tensorferry.batcher import CloseReason
from tensorferry.batcher.testing import ScriptedRunner, VirtualClock


def test_rows_fill_a_batch_not_requests(busy: Busy, clock: VirtualClock) -> None:
    batcher, runner = busy(None, 4, clock=clock)
    futures = [batcher.submit_rows(np.full(count, float(count))) for count in (3, 1, 2, 3, 1)]
    runner.open()
    assert [result(future).tolist() for future in futures] == [[6] * 3, [2], [4] * 2, [6] * 3, [2]]
    assert rows(runner, 1) == [[3, 3, 3, 1], [2, 2], [3, 3, 3, 1]]


def test_a_window_ends_so_long_after_the_arrival_of_the_oldest(make: Make, clock: VirtualClock) -> None:
    runner = ScriptedRunner()
    batcher = make(runner, 4, 10.0, clock=clock)
    futures = [batcher.submit(1.0)]
    clock.await_sleepers(until=10.0)
    clock.advance(6)
    futures.append(batcher.submit(2.0))
    clock.advance(3.5)
    assert not runner.batches
    clock.advance(0.5)
    assert results(futures) == [2, 4]
    assert rows(runner) == [[1, 2]]
    assert batcher.statistics().close_reasons == {CloseReason.WINDOW: 1}


def test_waiting_for_a_running_batch_counts_for_the_window(
    make: Make, runner: ScriptedRunner, clock: VirtualClock
) -> None:
    """A window measured from when the worker looks would wait twice."""
    batcher = make(runner, 4, 10.0, clock=clock)
    first = batcher.submit(0.0)
    clock.await_sleepers(until=10.0)
    clock.advance(10)
    runner.await_batches(1)
    second = batcher.submit(1.0)
    clock.advance(10)
    runner.open()
    assert [result(first), result(second)] == [0, 2]
    assert clock.now() == 20


def test_another_worker_takes_over_a_window_while_the_first_is_busy(make: Make, clock: VirtualClock) -> None:
    """While requests are queued, a worker runs or waits for them."""
    answered = threading.Event()
    seen: list[bool] = []
    batcher = make(lambda x: x * 2, 4, 60.0, workers=2, clock=clock)
    clock.await_sleepers(2)
    # The worker that waits for both is held in the completion of the request that expires first;
    # the two requests cannot share a batch.
    batcher.enqueue(
        new_request(
            [[1.0, 1.0]],
            lambda _: seen.append(answered.wait(PATIENCE)),
            deadline=30.0,
        )
    )
    living = batcher.submit(2.0)
    living.add_done_callback(lambda _: answered.set())
    clock.advance(30)
    clock.await_sleepers(until=60.0)
    clock.advance(30)
    assert result(living) == 4
    assert batcher.drain()
    assert seen == [True]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_burst_wakes_the_workers_that_it_needs(make: Make, clock: VirtualClock, workers: int) -> None:
    """Every idle worker with a batch to run is woken, without waiting for the next arrival."""
    runner = ScriptedRunner(gated=True)
    batcher = make(runner, 2, workers=workers, clock=clock)
    for _ in range(20):
        clock.await_sleepers(workers)
        before = len(runner.batches)
        future = batcher.submit_rows(np.zeros(2 * workers))
        runner.await_batches(before + workers)
        runner.release(workers)
        assert len(result(future)) == 2 * workers
