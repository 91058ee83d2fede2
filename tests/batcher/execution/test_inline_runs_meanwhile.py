"""Events during an inline run: requests of other threads, cancels, expiry, drain and close."""

from __future__ import annotations

import math
import threading

import numpy as np
import pytest
from batcher.conftest import Make
from support.batcher.inline_runs import LONG, MOST, Model, elsewhere, quietly, short_batches, wake_ups
from support.batcher.rig import PATIENCE, Recorder, enqueue, new_request

from tensorferry.batcher import Batcher, Outcome
from tensorferry.batcher.testing import VirtualClock


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def batcher(make: Make, model: Model, clock: VirtualClock) -> Batcher:
    return short_batches(make, model, clock)


def test_requests_of_others_run_after_the_inline_batch(
    batcher: Batcher, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No worker is woken, because it could only leave them to the thread that runs the batch."""
    woken, others = wake_ups(batcher, monkeypatch), []
    model.script = [lambda: elsewhere(lambda: others.append(enqueue(batcher, [2.0])[1]))]
    _, recorder, _ = quietly(batcher, [1.0])
    assert batcher.run_inline(MOST) == math.inf
    assert model.batches == [[1.0], [2.0]]
    assert model.here
    assert not woken
    assert (recorder.kind, others[0].kind) == ("answered", "answered")


def test_requests_of_others_are_run_by_a_worker_if_they_may_be_long(
    batcher: Batcher, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    others: list[Recorder] = []
    wide = np.ones((1, 2))
    batcher.add_warmup_sample(1, LONG, new_request(wide, Recorder()).key)
    model.script = [lambda: elsewhere(lambda: others.append(enqueue(batcher, wide)[1]))]
    quietly(batcher, [1.0])
    assert batcher.run_inline(MOST) == math.inf
    others[0].await_outcome()
    assert [thread is threading.current_thread() for thread in model.threads] == [True, False]


def test_a_second_thread_leaves_the_requests_to_the_first(batcher: Batcher, model: Model) -> None:
    others: list[Recorder] = []

    def another() -> None:
        others.append(quietly(batcher, [2.0])[1])
        assert batcher.run_inline(MOST) == math.inf
        assert not others[0].outcomes

    model.script = [lambda: elsewhere(another)]
    quietly(batcher, [1.0])
    assert batcher.run_inline(MOST) == math.inf
    assert model.batches == [[1.0], [2.0]]
    assert model.here
    assert others[0].kind == "answered"


def test_a_completion_may_enqueue_and_run_inline(batcher: Batcher, model: Model) -> None:
    """The thread runs the next batch after the current one, not inside it."""
    again = Recorder()

    def complete(outcome: Outcome) -> None:
        batcher.enqueue(new_request([2.0], again), notify=False)
        assert batcher.run_inline(MOST) == math.inf
        assert not again.outcomes

    batcher.enqueue(new_request([1.0], complete), notify=False)
    assert batcher.run_inline(MOST) == math.inf
    assert again.only.outputs.tolist() == [4.0]


def test_a_request_that_expires_during_another_batch_fails_at_once(
    batcher: Batcher, model: Model, clock: VirtualClock
) -> None:
    """The worker waits for the device and cannot expire it."""
    late: list[Recorder] = []

    def expire() -> None:
        late.append(quietly(batcher, [2.0], deadline=clock.now() + 0.01)[1])
        clock.await_sleepers(2)
        clock.advance(0.011)
        late[0].await_outcome()

    model.script = [expire]
    quietly(batcher, [1.0])
    assert batcher.run_inline(MOST) == math.inf
    assert late[0].kind == "DeadlineExceeded"
    assert model.batches == [[1.0]]


def test_drain_waits_for_an_inline_run(batcher: Batcher, model: Model, clock: VirtualClock) -> None:
    drained: list[bool] = []
    drain = threading.Thread(target=lambda: drained.append(batcher.drain()))

    def during() -> None:
        drain.start()
        clock.await_sleepers(2)
        assert not drained

    model.script = [during]
    _, recorder, _ = quietly(batcher, [1.0])
    assert batcher.run_inline(MOST) == math.inf
    drain.join(PATIENCE)
    assert drained == [True]
    assert recorder.kind == "answered"
