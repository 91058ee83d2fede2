"""Pipelining: the next batch is closed just in time; one thread at a time calls the model function."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from batcher.conftest import Make
from polling import until
from support.batcher.rig import Recorder, enqueue, error, fails_below_zero, new_request, reach, result, rows

from tensorferry.batcher import Batcher, Outcome
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

    batcher.enqueue(new_request([1.0], complete))
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


def test_an_idle_device_gets_a_batch_before_a_busy_one(make: Make) -> None:
    """Even while nothing is known of batch times."""
    for _ in range(5):
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
    queue = RequestQueue(BatcherSettings(4, pipelined=True), clock, returns=Expecting())

    def put() -> None:
        queue.put([new_request([1.0], Recorder())])

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
