"""Life cycle of a batcher: validation of its options, the ways to close it, and calls after that."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from batcher.conftest import Make
from polling import until
from support.batcher.rig import enqueue, error, ignore, occupy, reach, result

from tensorferry.batcher import Batcher, BatcherClosed, Outcome, RunTimedOut
from tensorferry.batcher.execution.collate import request_of
from tensorferry.batcher.testing import ScriptedRunner, VirtualClock


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_batch_size", -1),
        ("max_queue_delay", -0.001),
        ("max_queue_delay", float("nan")),
        ("max_queue_delay", float("inf")),
        ("max_queue_size", 0),
        ("max_queue_bytes", 0),
        ("workers", 0),
    ],
)
def test_a_bad_option_is_named_with_its_value(option: str, value: Any) -> None:
    threads = threading.active_count()
    with pytest.raises(ValueError, match=rf"^{option} is {value}; it must be at least \d and finite$"):
        Batcher(lambda x: x, **{option: value})
    # Another test's thread may end meanwhile.
    assert threading.active_count() <= threads


def test_leaving_the_context_finishes_accepted_requests(runner: ScriptedRunner) -> None:
    with Batcher(runner) as batcher:
        futures = [occupy(batcher, runner), batcher.submit(1.0)]
        runner.open()
    assert all(future.done() for future in futures)
    assert [result(future) for future in futures] == [0, 2]


def test_the_worker_threads_have_names_and_end_at_close() -> None:
    batcher = Batcher(lambda x: x, workers=3, name="digits")
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("digits-worker-")]
    assert [thread.name for thread in threads] == [f"digits-worker-{index}" for index in range(3)]
    assert batcher.close()
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("workers", [1, 4])
def test_idle_workers_wake_up_to_end(workers: int) -> None:
    for _ in range(20):
        assert Batcher(lambda x: x, workers=workers).close()


@pytest.mark.parametrize("method", ["submit", "submit_rows"])
@pytest.mark.parametrize("end", [Batcher.close, Batcher.drain])
def test_a_closed_batcher_refuses(make: Make, method: str, end: Any) -> None:
    batcher = make(lambda x: x)
    assert end(batcher)
    assert end(batcher), "ending it again is no error"
    with pytest.raises(BatcherClosed, match="accepts no new requests"):
        getattr(batcher, method)([1.0])
    assert batcher.statistics().refused == 1


def test_drain_waits_only_so_long(make: Make, runner: ScriptedRunner) -> None:
    batcher = make(runner)
    future = occupy(batcher, runner)
    assert not batcher.drain(timeout=0)
    assert not batcher.drain(timeout=0.001)
    runner.open()
    assert batcher.drain()
    assert future.done()


def test_drain_does_not_wait_out_a_window(make: Make) -> None:
    batcher = make(lambda x: x, 32, 3600.0)
    future = batcher.submit(1.0)
    assert batcher.drain()
    assert result(future) == 1


def test_waiting_until_idle_accepts_requests(make: Make, runner: ScriptedRunner) -> None:
    batcher = make(runner)
    assert batcher.wait_idle(0.0)
    futures = [occupy(batcher, runner)]
    assert not batcher.wait_idle(0.0)
    futures.append(batcher.submit(1.0))
    runner.open()
    assert batcher.wait_idle()
    assert all(future.done() for future in futures)
    assert result(batcher.submit(2.0)) == 4


def test_after_a_flush_no_batch_waits_for_its_window(make: Make) -> None:
    batcher = make(lambda x: x, 32, 3600.0)
    future = batcher.submit(1.0)
    batcher.flush()
    assert result(future) == 1
    assert result(batcher.submit(2.0)) == 2


@pytest.mark.parametrize("how", ["cancelled", "dropped", "closed", "empty", "hung"])
def test_drain_waits_for_the_completion_of_a_request_that_ended_without_a_batch(
    make: Make, runner: ScriptedRunner, clock: VirtualClock, how: str
) -> None:
    """Another thread calls the completion, while no worker has anything to do."""
    batcher = make(runner, 1, max_queue_size=1, priority_weights=(1, 1), clock=clock, name="drained")
    _, occupied = enqueue(batcher, [0.0])
    runner.await_batches(1)
    completing, may_return = threading.Event(), threading.Event()

    def complete(outcome: Outcome) -> None:
        completing.set()
        reach(may_return)

    request = request_of(np.zeros((0 if how == "empty" else 1, 1)), complete, one_row=False)
    if how == "hung":
        runner.release()
        occupied.await_outcome()
    if how != "empty":
        batcher.enqueue(request)
    if how == "hung":
        runner.await_batches(2)
    urgent = request_of(np.zeros((1, 1)), ignore, one_row=False)
    urgent.priority = 1
    ends = {
        "cancelled": lambda: batcher.cancel(request),
        "dropped": lambda: batcher.enqueue(urgent),
        "closed": lambda: batcher.close(drain=False),
        "empty": lambda: batcher.answer_empty(request, np.zeros((0, 1))),
        "hung": lambda: batcher.abort_hung_run(0, RunTimedOut("hung")),
    }
    thread = threading.Thread(target=ends[how])
    thread.start()
    reach(completing)
    runner.open()
    if how == "closed":
        until(lambda: not any(thread.name == "drained-worker-0" for thread in threading.enumerate()))
    else:
        clock.await_sleepers()
    drained = batcher.drain(0.0)
    may_return.set()
    thread.join()
    assert not drained
    assert batcher.drain()


def test_the_completion_of_a_cancel_may_drain_and_close(make: Make, runner: ScriptedRunner) -> None:
    batcher = make(runner)
    running = occupy(batcher, runner)
    said: list[bool] = []
    request = request_of(
        np.zeros((1, 1)), lambda outcome: said.extend((batcher.drain(), batcher.close())), one_row=False
    )
    batcher.enqueue(request)
    assert batcher.cancel(request)
    assert said == [False, False]
    runner.open()
    assert result(running) == 0
    assert batcher.close()


def test_close_without_drain_fails_queued_requests_at_once(make: Make, runner: ScriptedRunner) -> None:
    batcher = make(runner)
    running, queued = occupy(batcher, runner), batcher.submit(1.0)
    assert not batcher.close(drain=False, timeout=0), "a worker is still inside the model function"
    assert isinstance(error(queued), BatcherClosed)
    assert not running.done()
    runner.open()
    assert batcher.close()
    assert result(running) == 0
    assert batcher.statistics().abandoned == 1


def test_close_fails_queued_requests_after_its_timeout(make: Make, runner: ScriptedRunner) -> None:
    batcher = make(runner)
    running, queued = occupy(batcher, runner), batcher.submit(1.0)
    assert not batcher.close(timeout=0.001)
    assert isinstance(error(queued), BatcherClosed)
    runner.open()
    assert result(running) == 0


def test_the_text_form_shows_the_load(make: Make, runner: ScriptedRunner) -> None:
    batcher = make(runner, name="digits")
    occupy(batcher, runner)
    batcher.submit(1.0)
    assert repr(batcher) == "<Batcher digits: 1 requests running, 1 queued>"
