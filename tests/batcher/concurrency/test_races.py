"""Pairs of racing events, each forced into both orders: a request ends once, as the first event says."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from batcher.conftest import Make
from support.batcher.rig import Recorder, enqueue, occupy, reach, result

from tensorferry.batcher import Batcher, BatcherClosed, Outcome, Request
from tensorferry.batcher.execution.collate import request_of
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
    first = request_of([1.0], lambda _: cancelled.append(batcher.cancel(second[0])), one_row=False)
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

    request = request_of(np.zeros(5), complete, one_row=False)
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


def test_cancel_after_the_worker_saw_the_deadline(
    make: Make, runner: ScriptedRunner, clock: VirtualClock
) -> None:
    batcher = make(runner, clock=clock)
    occupy(batcher, runner)
    second: list[Request] = []
    cancelled: list[bool] = []
    first = request_of(
        [1.0], lambda _: cancelled.append(batcher.cancel(second[0])), one_row=False, deadline=5.0
    )
    batcher.enqueue(first)
    request, recorder = enqueue(batcher, [2.0], deadline=5.0)
    second.append(request)
    clock.advance(5)
    runner.open()
    assert batcher.close()
    assert cancelled == [False]
    assert recorder.kind == "DeadlineExceeded"


def test_cancel_between_the_closing_of_a_batch_and_its_join(
    make: Make, runner: ScriptedRunner, clock: VirtualClock
) -> None:
    """The completion of an expired request runs exactly there. The batch must not fail because of it."""
    batcher = make(runner, clock=clock)
    occupy(batcher, runner)
    members: list[tuple[Request, Recorder]] = []
    cancelled: list[bool] = []
    expiring = request_of(
        [0.0], lambda _: cancelled.append(batcher.cancel(members[0][0])), one_row=False, deadline=5.0
    )
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

    def model_fn(x: Any) -> Any:
        clock.advance(seconds)
        return x

    batcher = make(model_fn, clock=clock)
    _, recorder = enqueue(batcher, [1.0], deadline=5.0)
    assert batcher.close()
    assert recorder.kind == kind


def test_a_future_is_cancelled_once(make: Make, runner: ScriptedRunner) -> None:
    batcher = make(runner)
    future = occupy(batcher, runner)
    assert future.cancel()
    assert future.cancel(), "as concurrent.futures has it: it is cancelled"
    assert batcher.statistics().cancelled == 1


def test_submit_from_the_model_while_closing_is_refused(make: Make) -> None:
    seen: list[BaseException] = []

    def model_fn(x: Any) -> Any:
        try:
            batcher.submit(1.0)
        except BatcherClosed as error:
            seen.append(error)
        return x

    runner = ScriptedRunner(model_fn, gated=True)
    batcher = make(runner)
    future = occupy(batcher, runner)
    assert not batcher.drain(timeout=0)
    runner.open()
    assert batcher.close()
    assert result(future) == 0
    assert len(seen) == 1


@pytest.mark.parametrize("method", ["close", "drain"])
def test_a_completion_may_end_the_batcher(make: Make, runner: ScriptedRunner, method: str) -> None:
    """The batcher cannot wait for its own thread, so the worker finishes the queue and ends."""
    batcher: Batcher = make(runner, 1)
    first = occupy(batcher, runner)
    rest = [batcher.submit(float(tag)) for tag in range(3)]
    ended: list[bool] = []
    first.add_done_callback(lambda _: ended.append(getattr(batcher, method)()))
    runner.open()
    assert [result(future) for future in rest] == [0, 2, 4]
    assert ended == [False]
    assert batcher.close()


def test_drain_does_not_return_before_the_last_completion_has(make: Make) -> None:
    entered, leave = threading.Event(), threading.Event()

    def complete(outcome: Outcome) -> None:
        entered.set()
        reach(leave)

    batcher = make(lambda x: x)
    batcher.enqueue(request_of([1.0], complete, one_row=False))
    reach(entered)
    assert not batcher.drain(timeout=0)
    leave.set()
    assert batcher.drain()
