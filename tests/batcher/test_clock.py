"""The real clock: timeouts beyond the system's limit are waited for in parts."""

from __future__ import annotations

import threading

import pytest

from tensorferry.batcher import Batcher
from tensorferry.batcher.clock import MonotonicClock


@pytest.mark.parametrize("seconds", [1e10, 1e18, 1e300])
def test_a_deadline_centuries_away_is_waited_for(seconds: float) -> None:
    clock, condition, waited = MonotonicClock(), threading.Condition(), threading.Event()

    def wait() -> None:
        with condition:
            condition.notify_all()
            clock.wait(condition, clock.now() + seconds)
            waited.set()

    with condition:
        thread = threading.Thread(target=wait)
        thread.start()
        condition.wait()
        condition.notify_all()
    thread.join(30)
    assert waited.is_set()


def test_a_request_with_such_a_deadline_is_answered_behind_others() -> None:
    gate = threading.Event()

    def slow(x: object) -> object:
        gate.wait(30)
        return x

    with Batcher(slow, 1) as batcher:
        first = batcher.submit(1.0)
        second = batcher.submit(2.0, timeout=1e18)
        gate.set()
        assert (first.result(30), second.result(30)) == (1.0, 2.0)
