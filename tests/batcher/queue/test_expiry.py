"""A request that cannot meet its deadline is completed at once, even while every worker runs the
model.
"""

from __future__ import annotations

import math
import threading

import pytest
from batcher.conftest import Busy, Make
from polling import until
from support.batcher.rig import error, occupy, result, results, takes

from tensorferry.batcher import DeadlineExceeded
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
    assert results([*busy, living]) == [0] * len(busy) + [4]


def test_an_earlier_deadline_moves_the_watch_forward(busy: Busy, clock: Watched) -> None:
    batcher, _ = busy(None, 1, clock=clock)
    batcher.submit(1.0, timeout=50.0)
    clock.await_sleepers(until=50.0)
    early = batcher.submit(1.0, timeout=5.0)
    clock.await_sleepers(until=5.0)
    clock.advance(5.0)
    assert isinstance(error(early), DeadlineExceeded)


def test_a_request_fails_once_its_deadline_is_unreachable(make: Make, clock: Watched) -> None:
    runner = ScriptedRunner(takes(clock, 0.1), gated=True)
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
    clock.await_sleepers(until=math.inf)
    future = batcher.submit(1.0, timeout=10.0)
    clock.await_sleepers(1)
    assert not any(until == 10.0 for until, _ in clock._sleepers), "its worker wakes before that"
    clock.advance(9.9998)
    assert result(future) == 2


def test_without_deadlines_no_thread_waits_for_one(busy: Busy, clock: Watched) -> None:
    batcher, runner = busy(None, 1, clock=clock)
    waits = clock.waits
    queued = [batcher.submit(1.0) for _ in range(50)]
    clock.advance(1e6)
    assert not any(future.done() for future in queued)
    assert clock.waits == waits
    runner.open()
    assert results(queued) == [2] * 50


def test_waiting_for_deadlines_is_no_busy_loop(busy: Busy, clock: Watched) -> None:
    """One wait for each deadline that becomes the earliest, and one for each that passes."""
    batcher, _ = busy(None, 1, clock=clock)
    before = clock.waits
    futures = [batcher.submit(1.0, timeout=float(timeout)) for timeout in range(1, 21)]
    for future in futures:
        clock.await_sleepers(until=clock.now() + 1)
        clock.advance(1.0)
        assert isinstance(error(future), DeadlineExceeded)
    assert clock.waits - before <= 2 * len(futures)
