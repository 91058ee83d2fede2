"""Properties 9 and 14 of the product's queue in virtual time: overload costs no throughput, and wall
time has no effect.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
from batcher.conftest import Make
from support.batcher.rig import occupy, result
from support.batcher.virtual_time import Sender, answered

from tensorferry.batcher import DeadlineExceeded
from tensorferry.batcher.testing import ScriptedRunner


@pytest.mark.parametrize(
    ("devices", "pipelined"), [(1, False), (2, False), (1, True)], ids=["one", "two", "pipelined"]
)
def test_overload_costs_no_throughput(devices: int, pipelined: bool) -> None:
    """Property 9: at twice the capacity, as many answers are in time as at any load; below it, nearly all are."""
    rates = {
        load: answered({"": Sender(load)}, seconds=0.5, devices=devices, pipelined=pipelined)[""]
        for load in (0.7, 1.1, 2.0, 4.0)
    }
    # Property 7. Requests that arrive at the very end are not answered any more.
    assert rates[0.7] >= 0.93 * 0.7
    assert rates[2.0] >= 0.97 * max(rates.values())
    assert rates[4.0] >= 0.95 * max(rates.values())


def test_the_wall_clock_means_nothing(
    make: Make, runner: ScriptedRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Property 14: the wall clock is not used, so it may jump."""

    def asked() -> Any:
        raise AssertionError("the wall clock was asked")

    monkeypatch.setattr(time, "time", asked)
    monkeypatch.setattr(time, "time_ns", asked)
    batcher = make(runner, 4, 0.001)
    future = occupy(batcher, runner)
    later = batcher.submit(2.0, timeout=1e9)
    # It expires in the queue, or already on arrival if this thread is delayed.
    with pytest.raises(DeadlineExceeded):
        result(batcher.submit(1.0, timeout=0.01))
    runner.open()
    assert [result(future), result(later)] == [0, 4]
