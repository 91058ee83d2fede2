"""Life cycle of a batcher: validation of its options, the ways to close it, and calls after that."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from batcher.conftest import Busy, Make
from polling import until
from support.batcher.rig import enqueue, error, new_request, occupy, reach, result

from tensorferry.batcher import Batcher, BatcherClosed, CloseReason, Outcome, RunTimedOut
from tensorferry.batcher.testing import ScriptedRunner, VirtualClock


def test_the_threads_have_names_and_end_at_close() -> None:
    batcher = Batcher(lambda x: x, workers=3, name="digits")
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("digits-")]
    assert [thread.name[7:] for thread in threads] == ["worker-0", "worker-1", "worker-2", "expiry"]
    assert batcher.close()
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("method", ["submit", "submit_rows"])
@pytest.mark.parametrize("end", [Batcher.close, Batcher.drain])
def test_a_closed_batcher_refuses(make: Make, method: str, end: Any) -> None:
    batcher = make(lambda x: x)
    assert end(batcher)
    assert end(batcher), "ending it again is no error"
    with pytest.raises(BatcherClosed, match="accepts no new requests"):
        getattr(batcher, method)([1.0])
    assert batcher.statistics().refused == 1


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


@pytest.mark.parametrize("end", [Batcher.flush, Batcher.drain])
def test_after_a_flush_and_in_a_drain_no_batch_waits_for_its_window(make: Make, end: Any) -> None:
    batcher = make(lambda x: x, 32, 3600.0)
    future = batcher.submit(1.0)
    end(batcher)
    assert result(future) == 1
    assert batcher.statistics().close_reasons == {CloseReason.DRAIN: 1}
    if end is Batcher.flush:
        assert result(batcher.submit(2.0)) == 2


@pytest.mark.parametrize("how", ["answered", "expired", "cancelled", "dropped", "closed", "empty", "hung"])
def test_drain_waits_for_the_completion_of_every_request(
    make: Make, runner: ScriptedRunner, clock: VirtualClock, how: str
) -> None:
    """A completion may run on any thread, also while no worker has work."""
    batcher = make(runner, 1, max_queue_size=1, priority_weights=(1, 1), clock=clock, name="drained")
    _, occupied = enqueue(batcher, [0.0])
    runner.await_batches(1)
    completing, may_return = threading.Event(), threading.Event()

    def complete(outcome: Outcome) -> None:
        completing.set()
        reach(may_return)

    request = new_request(
        np.zeros((0 if how == "empty" else 1, 1)), complete, deadline=5.0 if how == "expired" else np.inf
    )
    if runs := how in ("answered", "hung"):
        runner.release()
        occupied.await_outcome()
    if how != "empty":
        batcher.enqueue(request)
    if runs:
        runner.await_batches(2)
    ends = {
        "answered": runner.open,
        "expired": lambda: clock.advance(5.0),
        "cancelled": lambda: batcher.cancel(request),
        "dropped": lambda: batcher.enqueue(new_request([1.0], priority=1)),
        "closed": lambda: batcher.close(drain=False),
        "empty": lambda: batcher.answer_without_run(request, np.zeros((0, 1))),
        "hung": lambda: batcher.abort_hung_run(0, RunTimedOut("hung")),
    }
    thread = threading.Thread(target=ends[how])
    thread.start()
    reach(completing)
    runner.open()
    if how == "closed":
        until(lambda: not any(thread.name == "drained-worker-0" for thread in threading.enumerate()))
    elif how != "answered":
        clock.await_sleepers()
    drained = batcher.drain(0.0)
    may_return.set()
    thread.join()
    assert not drained
    assert batcher.drain()


@pytest.mark.parametrize("how", ["answered", "expired", "cancelled", "inline"])
def test_a_completion_may_drain_and_close(
    make: Make, runner: ScriptedRunner, clock: VirtualClock, how: str
) -> None:
    """It cannot wait for its own thread. What is queued still runs, and the worker ends by itself."""
    batcher, said, called = make(runner, 1, clock=clock), list[bool](), threading.Event()

    def complete(outcome: Outcome) -> None:
        said.extend((batcher.drain(), batcher.close()))
        called.set()

    request = new_request([1.0], complete, deadline=5.0 if how == "expired" else np.inf)
    if how == "inline":
        batcher.add_warmup_sample(1, 1e-6)
        clock.await_sleepers()
        runner.open()
        batcher.enqueue(request, notify=False)
        batcher.run_inline(1.0)
    else:
        running = occupy(batcher, runner)
        batcher.enqueue(request)
        queued = batcher.submit(2.0)
        if how == "expired":
            clock.await_sleepers(until=5.0)
            clock.advance(5.0)
        if how == "cancelled":
            assert batcher.cancel(request)
        if how == "answered":
            runner.open()
        reach(called)
        runner.open()
        assert (result(running), result(queued)) == (0, 4)
    assert said == [False, False]
    assert batcher.close()


@pytest.mark.parametrize("how", [{"drain": False, "timeout": 0}, {"timeout": 0.001}], ids=str)
def test_close_without_drain_or_after_its_timeout_fails_queued_requests(
    make: Make, runner: ScriptedRunner, how: Any
) -> None:
    batcher = make(runner)
    running, queued = occupy(batcher, runner), batcher.submit(1.0)
    assert not batcher.close(**how), "a worker is still inside the model function"
    assert isinstance(error(queued), BatcherClosed)
    assert not running.done()
    runner.open()
    assert batcher.close()
    assert result(running) == 0
    assert batcher.statistics().abandoned == 1


def test_the_text_form_shows_the_load(busy: Busy) -> None:
    batcher, _ = busy(name="digits")
    batcher.submit(1.0)
    assert repr(batcher) == "<Batcher digits: 1 requests running, 1 queued>"
