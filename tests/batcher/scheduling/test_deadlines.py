"""Deadlines: the earliest runs first, unreachable ones are refused or dropped, and old estimates are
not trusted.
"""

from __future__ import annotations

from typing import Any

import pytest
from batcher.conftest import Make
from support.batcher.rig import error, occupy, result, results

from tensorferry.batcher import Batcher, DeadlineExceeded, Shed
from tensorferry.batcher.testing import ScriptedRunner, VirtualClock

ALONE = 1.0
PER_ROW = 0.1


@pytest.fixture
def runner(clock: VirtualClock) -> ScriptedRunner:
    def model_fn(x: Any) -> Any:
        clock.advance(ALONE + PER_ROW * len(x))
        return x

    return ScriptedRunner(model_fn, gated=True)


@pytest.fixture
def batcher(make: Make, runner: ScriptedRunner, clock: VirtualClock) -> Batcher:
    """A batcher with known batch times, whose worker is busy with a first batch."""
    batcher = make(runner, 4, clock=clock)
    for rows in (1, 4):
        batcher.add_warmup_sample(rows, ALONE + PER_ROW * rows)
    result_of_first = occupy(batcher, runner)
    runner.release()
    result(result_of_first)
    occupy(batcher, runner)
    return batcher


def test_the_earliest_deadline_runs_first_and_requests_without_one_fill_the_batch(
    batcher: Batcher, runner: ScriptedRunner
) -> None:
    without_deadline = [batcher.submit(float(i)) for i in (1, 2)]
    late, early, middle = (batcher.submit(float(t), timeout=t) for t in (90, 30, 60))
    runner.open()
    results([*without_deadline, late, early, middle])
    assert [list(batch) for batch in runner.batches[2:]] == [[30.0, 60.0, 90.0, 1.0], [2.0]]


def test_a_deadline_too_short_even_alone_is_refused_on_arrival(
    batcher: Batcher, runner: ScriptedRunner
) -> None:
    with pytest.raises(DeadlineExceeded, match="alone the request would take"):
        batcher.submit(1.0, timeout=2.0)
    accepted = batcher.submit(1.0, timeout=10.0)
    runner.open()
    assert result(accepted) == 1
    assert batcher.statistics().refused == 1


def test_under_overload_the_fewest_oldest_are_shed_with_a_hint(make: Make, clock: VirtualClock) -> None:
    """Others arrive fast while a batch runs: the oldest then has slack for one row, but they need
    batches of four.
    """
    futures: list[Any] = []

    def model_fn(x: Any) -> Any:
        clock.advance(ALONE + PER_ROW * len(x))
        if len(futures) == 1:
            for tag in range(1, 9):
                clock.advance(0.001)
                futures.append(busy.submit(float(tag), timeout=9.0))
        return x

    runner = ScriptedRunner(model_fn, gated=True)
    busy = make(runner, 4, clock=clock)
    for rows in (1, 4):
        busy.add_warmup_sample(rows, ALONE + PER_ROW * rows)
    occupy(busy, runner)
    futures.append(busy.submit(0.0, timeout=2.3))
    runner.open()
    failure = error(futures[0])
    assert isinstance(failure, Shed)
    assert failure.retry_after > 0
    assert [result(future) for future in futures[1:]] == list(range(1, 9))
    assert [len(batch) for batch in runner.batches[1:]] == [4, 4]
    assert busy.statistics().shed == 1


def test_a_device_that_is_slow_no_more_is_trusted_again_within_a_few_batches(
    make: Make, clock: VirtualClock
) -> None:
    """One fast batch among slow ones teaches little: at one admitted request a second recovery would
    take many.
    """
    took = [2.0]

    def model_fn(x: Any) -> Any:
        clock.advance(took[0])
        return x

    batcher = make(ScriptedRunner(model_fn), 4, clock=clock)
    for _ in range(20):
        result(batcher.submit(1.0))
    # A worker learns a batch's time after the answer.
    assert batcher.wait_idle()
    took[0] = 0.02
    with pytest.raises(DeadlineExceeded):
        batcher.submit(1.0, timeout=0.5)
    clock.advance(1.0)
    for _ in range(50):
        result(batcher.submit(1.0, timeout=0.5))
        assert batcher.wait_idle()


def test_a_request_without_deadline_is_not_starved_by_those_with_one(
    make: Make, runner: ScriptedRunner, clock: VirtualClock
) -> None:
    batcher = make(runner, 2, clock=clock)
    for rows in (1, 2):
        batcher.add_warmup_sample(rows, ALONE + PER_ROW * rows)
    occupy(batcher, runner)
    without_deadline = batcher.submit(-1.0)
    with_deadline = [batcher.submit(float(i), timeout=1000.0 + i) for i in range(100)]
    runner.open()
    result(without_deadline)
    results(with_deadline)
    ridden_in = next(at for at, batch in enumerate(runner.batches) if -1.0 in list(batch))
    assert ridden_in <= 10
