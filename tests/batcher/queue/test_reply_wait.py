"""After answers, a batch waits for the submitting thread to report its remaining input."""

from __future__ import annotations

import math

import pytest
from batcher.conftest import Make
from support.batcher.rig import PATIENCE, Recorder, enqueue

from tensorferry.batcher import Batcher, Request
from tensorferry.batcher.execution.collate import request_of
from tensorferry.batcher.policy.close_rule import Wait
from tensorferry.batcher.queue.request_queue import RequestQueue
from tensorferry.batcher.request import BatchAssignment
from tensorferry.batcher.settings import BatcherSettings
from tensorferry.batcher.testing import ScriptedRunner, VirtualClock

SECONDS = 0.010
MOST_WAIT = SECONDS / 4
SHORT = 200e-6


def make_batcher(
    make: Make, runner: ScriptedRunner, clock: VirtualClock, seconds: float = SECONDS
) -> Batcher:
    batcher = make(runner, 4, clock=clock)
    for rows in (1, 4):
        batcher.add_warmup_sample(rows, seconds)
    clock.await_sleepers(until=math.inf)
    return batcher


@pytest.fixture
def batcher(make: Make, runner: ScriptedRunner, clock: VirtualClock) -> Batcher:
    """A batcher with batches of 10 ms. Its worker waits."""
    return make_batcher(make, runner, clock)


def quietly(batcher: Batcher, x: float, deadline: float = math.inf) -> Recorder:
    recorder = Recorder()
    request: Request = request_of([x], recorder, one_row=False, deadline=deadline)
    batcher.enqueue(request, notify=False)
    return recorder


def run_one(batcher: Batcher, runner: ScriptedRunner) -> None:
    """Run a batch of one; meanwhile another request arrives, and the thread reports it."""
    quietly(batcher, 1.0)
    batcher.run_inline(SHORT)
    runner.await_batches(1)
    quietly(batcher, 2.0)
    batcher.run_inline(SHORT)


def answer(runner: ScriptedRunner, clock: VirtualClock, seconds: float = SECONDS) -> None:
    """Complete the batch."""
    clock.advance(seconds)
    runner.release()


def await_wait(clock: VirtualClock) -> None:
    """Wait until the worker waits for an inline run, or for work. No other thread waits with a
    timeout.
    """
    clock.await_sleepers()


def batches(runner: ScriptedRunner, count: int) -> list[list[float]]:
    runner.await_batches(count)
    return [batch.tolist() for batch in runner.batches]


def test_requests_that_have_arrived_join_the_batch(
    batcher: Batcher, runner: ScriptedRunner, clock: VirtualClock
) -> None:
    run_one(batcher, runner)
    assert not batcher.wants_inline_run, "the device is busy"
    answer(runner, clock)
    await_wait(clock)
    assert batcher.wants_inline_run
    quietly(batcher, 3.0)
    batcher.run_inline(SHORT)
    assert batches(runner, 2) == [[1.0], [2.0, 3.0]]
    assert not batcher.wants_inline_run


def test_a_request_without_an_inline_run_is_run_by_a_worker(
    batcher: Batcher, runner: ScriptedRunner, clock: VirtualClock
) -> None:
    run_one(batcher, runner)
    answer(runner, clock)
    await_wait(clock)
    clock.advance(MOST_WAIT)
    assert batches(runner, 2) == [[1.0], [2.0]]
    assert not batcher.wants_inline_run


def test_it_waits_once(batcher: Batcher, runner: ScriptedRunner, clock: VirtualClock) -> None:
    run_one(batcher, runner)
    answer(runner, clock)
    await_wait(clock)
    clock.advance(MOST_WAIT / 2)
    batcher.run_inline(SHORT)
    assert batches(runner, 2) == [[1.0], [2.0]]


def test_a_full_batch_closes_at_once(batcher: Batcher, runner: ScriptedRunner, clock: VirtualClock) -> None:
    run_one(batcher, runner)
    for x in (3.0, 4.0, 5.0):
        quietly(batcher, x)
    answer(runner, clock)
    assert batches(runner, 2) == [[1.0], [2.0, 3.0, 4.0, 5.0]]


def test_a_batch_that_becomes_full_closes_once_that_is_reported(
    batcher: Batcher, runner: ScriptedRunner, clock: VirtualClock
) -> None:
    run_one(batcher, runner)
    answer(runner, clock)
    await_wait(clock)
    for x in (3.0, 4.0, 5.0, 6.0):
        quietly(batcher, x)
    batcher.run_inline(SHORT)
    assert batches(runner, 2) == [[1.0], [2.0, 3.0, 4.0, 5.0]]


def test_a_notified_request_never_waits(
    batcher: Batcher, runner: ScriptedRunner, clock: VirtualClock
) -> None:
    run_one(batcher, runner)
    enqueue(batcher, [3.0])
    answer(runner, clock)
    assert batches(runner, 2) == [[1.0], [2.0, 3.0]]


def test_and_ends_the_wait_of_others(batcher: Batcher, runner: ScriptedRunner, clock: VirtualClock) -> None:
    run_one(batcher, runner)
    answer(runner, clock)
    await_wait(clock)
    enqueue(batcher, [3.0])
    assert batches(runner, 2) == [[1.0], [2.0, 3.0]]


def test_an_idle_device_starts_at_once(batcher: Batcher, runner: ScriptedRunner, clock: VirtualClock) -> None:
    runner.open()
    quietly(batcher, 1.0)
    batcher.run_inline(SHORT)
    assert batches(runner, 1) == [[1.0]]
    clock.await_sleepers(until=math.inf)
    quietly(batcher, 2.0)
    batcher.run_inline(SHORT)
    assert batches(runner, 2) == [[1.0], [2.0]]


def test_a_short_batch_is_not_worth_it(make: Make, runner: ScriptedRunner, clock: VirtualClock) -> None:
    batcher = make_batcher(make, runner, clock, 0.9e-3)
    run_one(batcher, runner)
    answer(runner, clock, 0.9e-3)
    assert batches(runner, 2) == [[1.0], [2.0]]


@pytest.mark.parametrize(("deadline", "most"), [(math.inf, MOST_WAIT), (2.2 * SECONDS, 0.2 * SECONDS)])
def test_no_deadline_is_missed_by_it(clock: VirtualClock, deadline: float, most: float) -> None:
    queue = RequestQueue(BatcherSettings(4, 0.0, max_queue_size=100, max_queue_bytes=10_000), clock)
    for rows in (1, 4):
        queue.add_warmup_sample(rows, SECONDS)

    def put(deadline: float) -> None:
        request = Request((), lambda outcome: None, names=None, rows=1, nbytes=0, deadline=deadline)
        queue.put((request,), notify=False)

    put(math.inf)
    first = queue.poll()
    assert isinstance(first, BatchAssignment)
    put(deadline)
    clock.advance(SECONDS)
    queue.finish(first.batch)
    queue.last_response()
    queue.batch_done(first.batch, SECONDS)
    step = queue.poll()
    assert isinstance(step, Wait)
    assert SECONDS < step.until <= SECONDS + most


def test_a_drain_does_not_wait(batcher: Batcher, runner: ScriptedRunner, clock: VirtualClock) -> None:
    run_one(batcher, runner)
    runner.open()
    assert batcher.drain(PATIENCE)
    assert batches(runner, 2) == [[1.0], [2.0]]


def test_an_unsteady_model_runs_on_its_worker(make: Make, clock: VirtualClock) -> None:
    runner = ScriptedRunner()
    batcher = make(runner, 4, clock=clock, steady=False)
    batcher.add_warmup_sample(1, 1e-6)
    batcher.add_warmup_sample(4, 1e-6)
    clock.await_sleepers(until=math.inf)
    recorder = quietly(batcher, 1.0)
    assert batcher.run_inline(1.0) == math.inf
    assert recorder.await_outcome().outputs.tolist() == [2.0]
