"""Properties 9 and 14 of the product's queue in virtual time: overload costs no throughput, and wall
time has no effect.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
from batcher.conftest import Make
from support.batcher.rig import error, occupy, result
from support.batcher.virtual_time import Sender, answered

from tensorferry.batcher import DeadlineExceeded
from tensorferry.batcher.testing import ScriptedRunner, VirtualClock


@pytest.mark.parametrize(
    ("devices", "pipelined"), [(1, False), (2, False), (1, True)], ids=["one", "two", "pipelined"]
)
def test_overload_costs_no_throughput(devices: int, pipelined: bool) -> None:
    """Property 9: at twice the capacity, as many answers are in time as at any load; below it, nearly all are."""
    rates = {
        load: answered({"": Sender(load)}, seconds=0.6, devices=devices, pipelined=pipelined)[""]
        for load in (0.3, 0.7, 1.1, 2.0, 4.0)
    }
    # Property 7. Requests that arrive at the very end are not answered any more.
    assert rates[0.3] >= 0.88 * 0.3
    assert rates[0.7] >= 0.93 * 0.7
    assert rates[2.0] >= 0.97 * max(rates.values())
    assert rates[4.0] >= 0.95 * max(rates.values())


def test_the_wall_clock_means_nothing(
    make: Make, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Property 14: the wall clock is not used, so it may jump."""

    def asked() -> Any:
        raise AssertionError("the wall clock was asked")

    monkeypatch.setattr(time, "time", asked)
    monkeypatch.setattr(time, "time_ns", asked)
    runner = ScriptedRunner(gated=True)
    for virtual in (False, True):
        batcher = make(runner, 4, 0.001, clock=clock if virtual else None)
        if virtual:
            future = batcher.submit(0.0)
            clock.await_sleepers(1)
            clock.advance(0.001)
        else:
            future = occupy(batcher, runner)
        hopeless = batcher.submit(1.0, timeout=0.01)
        if virtual:
            clock.advance(0.02)
        assert isinstance(error(hopeless), DeadlineExceeded)
        runner.release()
        assert result(future) == 0
        later = batcher.submit(2.0, timeout=1e9)
        runner.release()
        assert batcher.drain()
        assert result(later) == 4
