"""The real clock: timeouts beyond the system's limit are waited for in parts."""

from __future__ import annotations

import threading

import pytest

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
