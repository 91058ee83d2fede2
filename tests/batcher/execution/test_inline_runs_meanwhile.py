"""While a thread that attends runs a batch: what others bring, who leaves, and who ends it all."""

from __future__ import annotations

import math
import threading

import numpy as np
import pytest
from batcher.conftest import Make
from support.batcher.inline_runs import LONG, MOST, Model, elsewhere, polls, quietly, short_batches
from support.batcher.rig import PATIENCE, Recorder, enqueue, reach

from tensorferry.batcher import Batcher, Outcome
from tensorferry.batcher.execution.collate import request_of
from tensorferry.batcher.testing import VirtualClock


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def batcher(make: Make, model: Model, clock: VirtualClock) -> Batcher:
    return short_batches(make, model, clock)


def test_what_others_bring_meanwhile_is_served_after_it(
    batcher: Batcher, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker is woken, finds the device lent, and leaves it to the thread that runs the batch."""
    asked, others = polls(monkeypatch), []

    def another() -> None:
        elsewhere(lambda: others.append(enqueue(batcher, [2.0])[1]))
        reach(asked)

    model.script = [another]
    _, recorder, _ = quietly(batcher, [1.0])
    assert batcher.run_inline(MOST) == math.inf
    assert model.batches == [[1.0], [2.0]]
    assert model.here
    assert (recorder.kind, others[0].kind) == ("answered", "answered")


def test_what_others_bring_meanwhile_is_the_workers_if_it_may_be_long(
    batcher: Batcher, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    others: list[Recorder] = []
    wide = np.ones((1, 2))
    batcher.add_warmup_sample(1, LONG, request_of(wide, Recorder(), one_row=False).key)
    model.script = [lambda: elsewhere(lambda: others.append(enqueue(batcher, wide)[1]))]
    quietly(batcher, [1.0])
    assert batcher.run_inline(MOST) == math.inf
    others[0].await_outcome()
    assert [thread is threading.current_thread() for thread in model.threads] == [True, False]


def test_who_attends_meanwhile_leaves_it_to_the_first(batcher: Batcher, model: Model) -> None:
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


def test_a_completion_may_enqueue_and_attend(batcher: Batcher, model: Model) -> None:
    """The thread is in the midst of a batch: it runs the next after it, not within."""
    again = Recorder()

    def complete(outcome: Outcome) -> None:
        batcher.enqueue(request_of([2.0], again, one_row=False), notify=False)
        assert batcher.run_inline(MOST) == math.inf
        assert not again.outcomes

    batcher.enqueue(request_of([1.0], complete, one_row=False), notify=False)
    assert batcher.run_inline(MOST) == math.inf
    assert again.only.outputs.tolist() == [4.0]


def test_who_cancels_while_it_runs_has_cancelled(batcher: Batcher, model: Model) -> None:
    request, recorder, _ = quietly(batcher, [1.0])
    _, neighbour, _ = quietly(batcher, [2.0])
    model.script = [lambda: elsewhere(lambda: batcher.cancel(request))]
    assert batcher.run_inline(MOST) == math.inf
    assert (recorder.kind, neighbour.kind) == ("Cancelled", "answered")
    assert neighbour.only.outputs.tolist() == [4.0]


def test_an_answer_after_the_deadline_is_none(batcher: Batcher, model: Model, clock: VirtualClock) -> None:
    model.script = [lambda: clock.advance(1.0)]
    _, recorder, _ = quietly(batcher, [1.0], deadline=clock.now() + 0.5)
    assert batcher.run_inline(MOST) == math.inf
    assert recorder.kind == "DeadlineExceeded"


def test_who_expires_while_another_batch_runs_is_told_at_once(
    batcher: Batcher, model: Model, clock: VirtualClock
) -> None:
    """The worker waits, but cannot see to it."""
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


def test_drain_waits_for_a_batch_that_runs_elsewhere(
    batcher: Batcher, model: Model, clock: VirtualClock
) -> None:
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


@pytest.mark.parametrize("drain", [False, True])
def test_a_close_meanwhile_ends_the_worker_after_it(
    batcher: Batcher, model: Model, clock: VirtualClock, drain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It woke for the close, and waited again, since the device was lent."""
    asked, closed, late = polls(monkeypatch), [], []
    close = threading.Thread(target=lambda: closed.append(batcher.close(drain=drain)))

    def during() -> None:
        late.append(quietly(batcher, [2.0])[1])
        close.start()
        reach(asked)
        # The worker has answered itself for both wake-ups, of the close and, without drain, of what it drops.
        clock.await_sleepers(2 if drain else 1)

    model.script = [during]
    _, recorder, _ = quietly(batcher, [1.0])
    assert batcher.run_inline(MOST) == math.inf
    close.join(PATIENCE)
    assert closed == [True]
    assert recorder.kind == "answered"
    assert late[0].kind == ("answered" if drain else "BatcherClosed")


@pytest.mark.parametrize("end", ["drain", "close"])
def test_a_completion_that_ends_the_batcher_does_not_wait_for_itself(batcher: Batcher, end: str) -> None:
    ended: list[bool] = []
    batcher.enqueue(
        request_of([1.0], lambda _: ended.append(getattr(batcher, end)()), one_row=False), notify=False
    )
    assert batcher.run_inline(MOST) == math.inf
    assert ended == [False]
    assert batcher.close(), "from elsewhere it waits"
