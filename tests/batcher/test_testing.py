"""The public testing tools."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.batcher.rig import PATIENCE, reach

from tensorferry.batcher.testing import ScriptedRunner, VirtualClock


def test_the_clock_moves_only_on_request(clock: VirtualClock) -> None:
    assert clock.now() == clock.now() == 0
    clock.advance(2.5)
    assert clock.now() == 2.5
    assert VirtualClock(start=7).now() == 7


@pytest.mark.parametrize("waker", ["advance", "notify"])
def test_a_wait_ends_by_time_or_by_notification(clock: VirtualClock, waker: str) -> None:
    condition, woken = threading.Condition(), threading.Event()

    def sleep() -> None:
        with condition:
            clock.wait(condition, 5.0)
        woken.set()

    with ThreadPoolExecutor(1) as pool:
        sleeping = pool.submit(sleep)
        clock.await_sleepers(until=5.0)
        clock.advance(4.9)
        assert not woken.is_set()
        if waker == "advance":
            clock.advance(0.2)
        else:
            with condition:
                condition.notify()
        reach(woken)
        sleeping.result(PATIENCE)


def test_a_gated_runner_holds_each_batch_until_its_release(runner: ScriptedRunner) -> None:
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.submit(runner, 1), pool.submit(runner, 2)
        runner.await_batches(2)
        assert not first.done()
        assert not second.done()
        runner.release()
        runner.release()
        assert [first.result(PATIENCE), second.result(PATIENCE)] == [2, 4]
        runner.open()
        runner.open()
        assert runner(3) == 6
