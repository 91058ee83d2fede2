"""Pairs of racing events, each forced into both orders: a request ends once, as the first event says."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from batcher.conftest import Make
from support.batcher.rig import Recorder, enqueue, new_request, occupy, reach, takes

from tensorferry.batcher import Outcome, Request
from tensorferry.batcher.testing import ScriptedRunner, VirtualClock


def test_cancel_just_before_the_answer(make: Make) -> None:
    """The model has finished, but its results are not delivered yet."""
    held: list[Request] = []

    def model_fn(x: Any) -> Any:
        if 1.0 in x:
            assert batcher.cancel(held[0])
        return x

    runner = ScriptedRunner(model_fn, gated=True)
    batcher = make(runner)
    occupy(batcher, runner)
    request, recorder = enqueue(batcher, [1.0])
    _, neighbour = enqueue(batcher, [2.0])
    held.append(request)
    runner.open()
    assert batcher.close()
    assert (recorder.kind, neighbour.kind) == ("Cancelled", "answered")


def test_cancel_just_after_the_answer(make: Make, runner: ScriptedRunner) -> None:
    """While the batch's results are delivered, the neighbour's completion comes first and cancels."""
    batcher = make(runner)
    occupy(batcher, runner)
    second: list[Request] = []
    cancelled: list[bool] = []
    first = new_request([1.0], lambda _: cancelled.append(batcher.cancel(second[0])))
    batcher.enqueue(first)
    request, recorder = enqueue(batcher, [2.0])
    second.append(request)
    runner.open()
    assert batcher.close()
    assert cancelled == [False]
    assert recorder.only.outputs.tolist() == [4]


def test_cancel_of_a_request_from_its_own_completion(make: Make) -> None:
    batcher = make(lambda x: x, 2)
    cancelled: list[bool] = []
    done = threading.Event()

    def complete(outcome: Outcome) -> None:
        cancelled.append(batcher.cancel(request))
        done.set()

    request = new_request(np.zeros(5), complete)
    batcher.enqueue(request)
    reach(done)
    assert batcher.close()
    assert cancelled == [False], "the whole, though it was cut into parts"


def test_cancel_after_the_deadline_but_before_the_worker_saw_it(
    make: Make, runner: ScriptedRunner, clock: VirtualClock
) -> None:
    """The deadline passed first, so the request expired, whichever thread reports it."""
    batcher = make(runner, clock=clock)
    occupy(batcher, runner)
    request, recorder = enqueue(batcher, [1.0], deadline=5.0)
    clock.advance(5)
    assert batcher.cancel(request)
    runner.open()
    assert batcher.close()
    assert recorder.kind == "DeadlineExceeded"


def test_cancel_between_the_closing_of_a_batch_and_its_join(
    make: Make, runner: ScriptedRunner, clock: VirtualClock
) -> None:
    """The completion of an expired request runs exactly there. The batch must not fail because of it."""
    batcher = make(runner, clock=clock)
    occupy(batcher, runner)
    members: list[tuple[Request, Recorder]] = []
    cancelled: list[bool] = []
    expiring = new_request([0.0], lambda _: cancelled.append(batcher.cancel(members[0][0])), deadline=5.0)
    batcher.enqueue(expiring)
    members += [enqueue(batcher, [value]) for value in (1.0, 2.0)]
    clock.advance(5)
    runner.open()
    assert batcher.close()
    assert cancelled == [True]
    assert [recorder.kind for _, recorder in members] == ["Cancelled", "answered"]
    assert batcher.statistics().failed_batches == 0


@pytest.mark.parametrize(("seconds", "kind"), [(4.75, "answered"), (5.0, "DeadlineExceeded")])
def test_a_deadline_that_passes_with_the_answer(
    make: Make, clock: VirtualClock, seconds: float, kind: str
) -> None:
    """An answer at the deadline itself is late; before it, in time."""

    batcher = make(takes(clock, seconds), clock=clock)
    _, recorder = enqueue(batcher, [1.0], deadline=5.0)
    assert batcher.close()
    assert recorder.kind == kind
