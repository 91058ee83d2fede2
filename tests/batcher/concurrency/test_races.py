"""Pairs of racing events, each forced into both orders: a request ends once, as the first event says."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from batcher.conftest import Busy, Make
from support.batcher.rig import Recorder, enqueue, new_request, reach, takes

from tensorferry.batcher import Outcome, Request
from tensorferry.batcher.testing import VirtualClock


def test_cancel_just_after_the_answer(busy: Busy) -> None:
    """While the batch's results are delivered, the neighbour's completion comes first and cancels."""
    batcher, runner = busy()
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


def test_cancel_after_the_deadline_but_before_the_worker_saw_it(busy: Busy, clock: VirtualClock) -> None:
    """The deadline passed first, so the request expired, whichever thread reports it."""
    batcher, runner = busy(clock=clock)
    request, recorder = enqueue(batcher, [1.0], deadline=5.0)
    clock.advance(5)
    assert batcher.cancel(request)
    runner.open()
    assert batcher.close()
    assert recorder.kind == "DeadlineExceeded"


def test_cancel_between_the_closing_of_a_batch_and_its_join(busy: Busy, clock: VirtualClock) -> None:
    """The completion of an expired request runs exactly there. The batch must not fail because of it."""
    batcher, runner = busy(clock=clock)
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
