"""Pipelining: the next batch is closed just in time; one thread at a time calls the model function."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from batcher.conftest import Make
from polling import until
from support.batcher.rig import (
    PATIENCE,
    Recorder,
    enqueue,
    error,
    fails_below_zero,
    reach,
    result,
    rows,
)

from tensorferry.batcher import Batcher, BatcherClosed, Outcome
from tensorferry.batcher.execution.collate import request_of
from tensorferry.batcher.learning.return_model import ReturnModel
from tensorferry.batcher.policy.close_rule import Wait
from tensorferry.batcher.queue.request_queue import RequestQueue
from tensorferry.batcher.request import BatchAssignment
from tensorferry.batcher.settings import BatcherSettings
from tensorferry.batcher.testing import ScriptedRunner, VirtualClock

SECONDS = 10.0
GUARD = 300e-6


@pytest.fixture
def batcher(make: Make, runner: ScriptedRunner, clock: VirtualClock) -> Batcher:
    """A batcher with a batch in flight that knows that batches take ten seconds."""
    batcher = make(runner, 4, pipelined=True, clock=clock)
    for count in (1, 4):
        batcher.add_warmup_sample(count, SECONDS)
    enqueue(batcher, [0.0])
    runner.await_batches(1)
    clock.await_sleepers(1)
    return batcher


def leave_just_in_time(clock: VirtualClock) -> None:
    clock.await_sleepers(until=SECONDS - GUARD)
    clock.advance(SECONDS - GUARD)


def test_the_next_batch_is_closed_just_in_time_and_not_earlier(
    batcher: Batcher, runner: ScriptedRunner, clock: VirtualClock
) -> None:
    first, second = (enqueue(batcher, [float(tag)])[1] for tag in (1, 2))
    clock.await_sleepers(until=SECONDS - GUARD)
    clock.advance(SECONDS - 2 * GUARD)
    third = enqueue(batcher, [3.0])[1]
    assert batcher.statistics().sizes.queued == 3, "it is closed late"
    clock.advance(1.01 * GUARD)
    until(lambda: batcher.statistics().sizes.queued == 0)
    assert len(runner.batches) == 1, "closed while the first still runs"
    assert batcher.statistics().sizes.running == 4
    late = enqueue(batcher, [4.0])[1]
    runner.release()
    runner.await_batches(2)
    assert rows(runner) == [[0], [1, 2, 3]]
    runner.open()
    assert batcher.close()
    assert [one.only.outputs.tolist() for one in (first, second, third, late)] == [[2], [4], [6], [8]]


def test_a_device_that_is_free_early_gets_the_next_batch_at_once(
    batcher: Batcher, runner: ScriptedRunner, clock: VirtualClock
) -> None:
    enqueue(batcher, [1.0])
    runner.release()
    runner.await_batches(2)
    assert clock.now() == 0


def test_at_most_two_batches_are_in_flight(
    batcher: Batcher, runner: ScriptedRunner, clock: VirtualClock
) -> None:
    for tag in range(1, 9):
        enqueue(batcher, [float(tag)])
    leave_just_in_time(clock)
    until(lambda: batcher.statistics().sizes.queued <= 4)
    clock.advance(100 * SECONDS)
    sizes = batcher.statistics().sizes
    assert (sizes.queued, sizes.running) == (4, 5)


def test_requests_are_completed_while_the_device_runs_the_next_batch(make: Make) -> None:
    runner = ScriptedRunner(gated=True)
    batcher = make(runner, 1, pipelined=True)
    entered, leave = threading.Event(), threading.Event()

    def complete(outcome: Outcome) -> None:
        entered.set()
        reach(leave)

    batcher.enqueue(request_of([1.0], complete, one_row=False))
    runner.release()
    reach(entered)
    _, other = enqueue(batcher, [2.0])
    runner.await_batches(2)
    runner.release()
    assert other.await_outcome().outputs.tolist() == [4], "while the first is still being completed"
    leave.set()


def unsplittable(x: Any) -> Any:
    return x[:-1] if (x < 0).any() else x * 2


@pytest.mark.parametrize("model_fn", [fails_below_zero, unsplittable], ids=["the model", "the split"])
def test_a_failure_releases_the_device(make: Make, model_fn: Any) -> None:
    """Only the request at fault fails, and later requests are served."""
    runner = ScriptedRunner(model_fn, gated=True)
    batcher = make(runner, 4, pipelined=True)
    enqueue(batcher, [0.0])
    runner.await_batches(1)
    futures = [batcher.submit(value) for value in (1.0, -2.0, 3.0, -4.0, 5.0)]
    runner.open()
    assert [result(futures[at]) for at in (0, 2, 4)] == [2, 6, 10]
    assert error(futures[1]) is not None
    assert error(futures[3]) is not None
    for _ in range(20):
        assert [result(batcher.submit(value)) for value in (6.0, 7.0)] == [12, 14]
    assert batcher.drain()


def test_a_failing_join_releases_the_device(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    batcher = make(lambda x: x, pipelined=True)
    with monkeypatch.context() as patch:
        patch.setattr("tensorferry.batcher.execution.executor.join", lambda batch: 1 / 0)
        assert isinstance(error(batcher.submit(1.0)), ZeroDivisionError)
    # A device that is not released takes at most two batches.
    assert [result(batcher.submit(value)) for value in (1.0, 2.0, 3.0)] == [1.0, 2.0, 3.0]
    assert batcher.drain()


@pytest.mark.parametrize("drain", [True, False])
def test_close_with_two_batches_in_flight(
    batcher: Batcher, runner: ScriptedRunner, clock: VirtualClock, drain: bool
) -> None:
    recorders = [enqueue(batcher, [float(tag)])[1] for tag in range(1, 7)]
    leave_just_in_time(clock)
    until(lambda: batcher.statistics().sizes.queued <= 2)
    closed: list[bool] = []
    closer = threading.Thread(target=lambda: closed.append(batcher.close(drain=drain)))
    closer.start()
    if not drain:
        assert isinstance(recorders[5].await_outcome().error, BatcherClosed)
    runner.open()
    closer.join(PATIENCE)
    assert closed == [True]
    assert [one.kind for one in recorders[:4]] == ["answered"] * 4
    assert [one.kind for one in recorders[4:]] == ["answered" if drain else "BatcherClosed"] * 2


def test_an_idle_device_gets_a_batch_before_a_busy_one(make: Make) -> None:
    """Even while nothing is known of batch times."""
    for _ in range(30):
        runners = [ScriptedRunner(gated=True) for _ in range(3)]
        clock = VirtualClock()
        batcher = make(runners, 1, pipelined=True, clock=clock)
        clock.await_sleepers(6)
        recorders = [enqueue(batcher, [1.0])[1] for _ in range(3)]
        for runner in runners:
            runner.await_batches(1)
        for runner in runners:
            runner.open()
        assert batcher.close()
        assert [recorder.kind for recorder in recorders] == ["answered"] * 3


class Expecting(ReturnModel):
    expected = True


@pytest.mark.parametrize("others", [0, 4])
def test_if_clients_return_the_next_batch_waits_for_the_answers_unless_it_is_full(
    clock: VirtualClock, others: int
) -> None:
    queue = RequestQueue(
        BatcherSettings(4, 0.0, max_queue_size=100, max_queue_bytes=1000, pipelined=True),
        clock,
        returns=Expecting(),
    )

    def put() -> None:
        queue.put([request_of([1.0], Recorder(), one_row=False)])

    put()
    first = queue.poll()
    assert isinstance(first, BatchAssignment)
    put()
    for _ in range(others):
        put()
    step = queue.poll()
    if others:
        assert isinstance(step, BatchAssignment)
        assert len(step.batch) == 4
        return
    assert step == Wait(float("inf"))
    queue.run_done(0)
    assert queue.poll() == Wait(float("inf")), "not answered yet"
    queue.finish(first.batch)
    queue.batch_done(first.batch, 1.0)
    assert isinstance(queue.poll(), BatchAssignment)
