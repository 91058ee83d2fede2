"""The checks of a load may take the time of ten runs of one row, and at least a second."""

from __future__ import annotations

from tensorferry.batcher.testing import VirtualClock
from tensorferry.server.runtime.checks.load_budget import _LEAST_SECONDS, LoadBudget


def test_a_fast_model_has_a_second() -> None:
    clock = VirtualClock()
    budget = LoadBudget(_LEAST_SECONDS, clock.now)
    assert budget.allows(10**6), "the time of a row is unknown"
    budget.row_took(0.001)
    assert budget.allows(1000)
    assert not budget.allows(1001)
    clock.advance(0.5)
    assert budget.used() == 0.5
    assert budget.allows(500)
    assert not budget.allows(501)


def test_a_slow_model_has_the_time_of_ten_rows() -> None:
    clock = VirtualClock()
    budget = LoadBudget(_LEAST_SECONDS, clock.now)
    for took in (9.0, 3.0, 4.0):
        budget.row_took(took)
    clock.advance(16.0)
    assert budget.allows(4)
    assert not budget.allows(5)
    assert not budget.allows(1, needed=False), "what is not needed has a second"
