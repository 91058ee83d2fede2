"""A request that cannot meet its deadline is completed at once, even while every worker runs the
model.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest
from batcher.conftest import Make
from polling import until
from support.batcher.rig import PATIENCE, Recorder, enqueue, error, occupy, reach, result

from tensorferry.batcher import Batcher, DeadlineExceeded, Outcome
from tensorferry.batcher.execution.collate import request_of
from tensorferry.batcher.learning.return_model import ReturnModel
from tensorferry.batcher.testing import ScriptedRunner, VirtualClock


class Watched(VirtualClock):
    """Clock that counts reads and waits, to detect a busy loop."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = 0

    def wait(self, condition: threading.Condition, until: float) -> None:
        self.waits += 1
        super().wait(condition, until)


@pytest.fixture
def clock() -> Watched:
    return Watched()


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("pipelined", [False, True])
def test_an_expired_request_is_completed_while_every_worker_is_busy(
    make: Make, runner: ScriptedRunner, clock: Watched, workers: int, pipelined: bool
) -> None:
    batcher = make(runner, 1, workers=workers, pipelined=pipelined, clock=clock)
    busy = [batcher.submit(0.0) for _ in range(workers)]
    runner.await_batches(workers)
    # The other worker of a pipelined device takes the next batch, because no times are known.
    busy += [batcher.submit(0.0) for _ in range(workers if pipelined else 0)]
    until(lambda: batcher.statistics().sizes.queued == 0)
    dying, living = batcher.submit(1.0, timeout=5.0), batcher.submit(2.0)
    later = batcher.submit(3.0, timeout=7.0)
    clock.await_sleepers(until=5.0)
    clock.advance(5.0)
    assert isinstance(error(dying), DeadlineExceeded)
    clock.await_sleepers(until=7.0)
    clock.advance(2.0)
    assert isinstance(error(later), DeadlineExceeded)
    assert not any(future.done() for future in [*busy, living])
    assert batcher.statistics().expired == 2
    runner.open()
    assert [result(future) for future in [*busy, living]] == [0] * len(busy) + [4]


def test_a_cancelled_request_does_not_expire_again(
    make: Make, runner: ScriptedRunner, clock: Watched
) -> None:
    batcher = make(runner, 1, clock=clock)
    occupy(batcher, runner)
    request, recorder = enqueue(batcher, [1.0], deadline=5.0)
    _, other = enqueue(batcher, [2.0], deadline=6.0)
    clock.await_sleepers(until=5.0)
    assert batcher.cancel(request)
    clock.advance(5.0)
    clock.await_sleepers(until=6.0)
    clock.advance(1.0)
    assert isinstance(other.await_outcome().error, DeadlineExceeded)
    assert recorder.kind == "Cancelled"


def test_an_earlier_deadline_moves_the_watch_forward(
    make: Make, runner: ScriptedRunner, clock: Watched
) -> None:
    batcher = make(runner, 1, clock=clock)
    occupy(batcher, runner)
    batcher.submit(1.0, timeout=50.0)
    clock.await_sleepers(until=50.0)
    early = batcher.submit(1.0, timeout=5.0)
    clock.await_sleepers(until=5.0)
    clock.advance(5.0)
    assert isinstance(error(early), DeadlineExceeded)


def test_a_request_fails_once_its_deadline_is_unreachable(make: Make, clock: Watched) -> None:
    def model_fn(x: Any) -> Any:
        clock.advance(0.1)
        return x

    runner = ScriptedRunner(model_fn, gated=True)
    batcher = make(runner, 1, clock=clock)
    first = occupy(batcher, runner)
    runner.release()
    result(first)
    occupy(batcher, runner)
    dying = batcher.submit(1.0, timeout=0.3)
    clock.advance(0.22)
    assert isinstance(error(dying), DeadlineExceeded)
    assert clock.now() == pytest.approx(0.32), "alone it takes 0.1; its deadline is at 0.4"


def test_an_idle_worker_watches_deadlines_alone(make: Make, clock: Watched) -> None:
    """The worker that waits for the end of the window wakes in time, so the request runs."""
    runner = ScriptedRunner()
    batcher = make(runner, 4, 100.0, clock=clock)
    future = batcher.submit(1.0, timeout=10.0)
    clock.await_sleepers(1)
    assert not any(until == 10.0 for until, _ in clock._sleepers), "its worker wakes before that"
    clock.advance(9.9998)
    assert result(future) == 2


def test_without_deadlines_no_thread_waits_for_one(
    make: Make, runner: ScriptedRunner, clock: Watched
) -> None:
    batcher = make(runner, 1, clock=clock)
    occupy(batcher, runner)
    waits = clock.waits
    queued = [batcher.submit(1.0) for _ in range(50)]
    clock.advance(1e6)
    assert not any(future.done() for future in queued)
    assert clock.waits == waits
    runner.open()
    assert [result(future) for future in queued] == [2] * 50


def test_waiting_for_deadlines_is_no_busy_loop(make: Make, runner: ScriptedRunner, clock: Watched) -> None:
    """One wait for each deadline that becomes the earliest, and one for each that passes."""
    batcher = make(runner, 1, clock=clock)
    occupy(batcher, runner)
    before = clock.waits
    futures = [batcher.submit(1.0, timeout=float(timeout)) for timeout in range(1, 21)]
    for future in futures:
        clock.await_sleepers(until=clock.now() + 1)
        clock.advance(1.0)
        assert isinstance(error(future), DeadlineExceeded)
    assert clock.waits - before <= 2 * len(futures)


def test_a_completion_of_the_expired_may_close_the_batcher(
    make: Make, runner: ScriptedRunner, clock: Watched
) -> None:
    """It runs on a thread of the batcher, which cannot wait for itself."""
    batcher = make(runner, 1, clock=clock)
    occupy(batcher, runner)
    ended: list[bool] = []
    called = threading.Event()

    def complete(outcome: Outcome) -> None:
        ended.append(batcher.close())
        called.set()

    batcher.enqueue(request_of([1.0], complete, one_row=False, deadline=5.0))
    clock.await_sleepers(until=5.0)
    clock.advance(5.0)
    reach(called)
    assert ended == [False]
    runner.open()
    assert batcher.close()


def test_drain_waits_for_the_completions_of_the_expired(
    make: Make, runner: ScriptedRunner, clock: Watched
) -> None:
    """Property 1: drained means completed, whichever thread completes."""
    batcher = make(runner, 1, clock=clock)
    busy = occupy(batcher, runner)
    entered, leave = threading.Event(), threading.Event()

    def complete(outcome: Outcome) -> None:
        entered.set()
        reach(leave)

    batcher.enqueue(request_of([1.0], complete, one_row=False, deadline=5.0))
    clock.await_sleepers(until=5.0)
    clock.advance(5.0)
    reach(entered)
    runner.open()
    assert result(busy) == 0
    assert not batcher.drain(timeout=0)
    clock.await_sleepers(0)
    leave.set()
    assert batcher.drain()


def test_a_worker_that_waits_for_its_neighbour_to_answer_does_not_watch(
    make: Make, clock: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If callers return, the next batch of a pipelined device waits for the answers of the last."""
    monkeypatch.setattr(ReturnModel, "expected", True)
    batcher = make(lambda x: x, 4, pipelined=True, clock=clock)
    entered, leave = threading.Event(), threading.Event()

    def complete(outcome: Outcome) -> None:
        entered.set()
        reach(leave)

    batcher.enqueue(request_of([1.0], complete, one_row=False))
    reach(entered)
    waiting: Future[Any] = batcher.submit(1.0, timeout=5.0)
    clock.await_sleepers(until=5.0)
    clock.advance(5.0)
    assert isinstance(error(waiting), DeadlineExceeded)
    leave.set()


@pytest.mark.parametrize("drain", [True, False])
def test_the_thread_that_watches_ends_with_the_batcher(runner: ScriptedRunner, drain: bool) -> None:
    batcher = Batcher(runner, 1, name="watched")
    busy = occupy(batcher, runner)
    recorder = Recorder()
    batcher.enqueue(request_of([1.0], recorder, one_row=False, deadline=1e9))
    closer = threading.Thread(target=batcher.close, kwargs={"drain": drain})
    closer.start()
    runner.open()
    closer.join(PATIENCE)
    assert result(busy) == 0
    assert recorder.kind in ("answered", "BatcherClosed")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("watched")]
