"""The shipping queue in the simulation: it answers all at low load, and sheds well in overload."""

from __future__ import annotations

from dataclasses import replace

import costs
import pytest
from engine import run
from policies import Peer
from scenarios import BEYOND, CPU, STUDY, Scenario
from shipping import Shipping
from summary import Summary, summarize


def play(scenario: Scenario, load: float, count: int) -> Summary:
    trace = scenario.trace(load, count, 2)
    queue = Shipping(scenario, trace)
    record = run(trace, scenario, queue, costs.noise(2))
    return summarize(trace, record)


@pytest.mark.parametrize("scenario", [*STUDY, *BEYOND], ids=lambda s: f"{s.name}-{s.kind}")
def test_answers_everything_at_low_load(scenario: Scenario) -> None:
    got = play(scenario, 0.1, 500)
    assert (got.in_time, got.late, got.dropped) == (1.0, 0.0, 0.0)


@pytest.mark.parametrize("load", [1.5, 3.0])
@pytest.mark.parametrize("scenario", [s for s in STUDY if s.kind == "Poisson"], ids=lambda s: s.name)
def test_works_at_nearly_the_offline_rate_in_overload(scenario: Scenario, load: float) -> None:
    got = play(scenario, load, 3000)
    assert got.goodput > 0.9 * scenario.capacity
    assert got.late < 0.01


def test_is_greedy_where_there_are_no_deadlines() -> None:
    """Without a window, a batch is all that waits: the same answers as the greedy peer's."""
    scenario = replace(CPU, timeouts=(1e6,))
    trace = scenario.trace(0.7, 500, 2)
    ours, greedy = (
        run(trace, scenario, scheduler, costs.noise(2))
        for scheduler in (Shipping(scenario, trace), Peer(scenario, trace))
    )
    assert ours == greedy
