"""The clairvoyant optimum equals exhaustive search, and no policy exceeds it."""

from __future__ import annotations

import itertools
import random

import costs
import pytest
from clairvoyant import MOVE, SLACK, fewest_misses
from costs import Cost
from engine import run
from measure import SCHEDULERS
from scenarios import CPU, GPU, STUDY, Scenario
from summary import summarize


def fits(
    arrivals: list[float], rest: frozenset[int], free: float, timeout: float, cost: Cost, size: int
) -> bool:
    """Return whether some order of batches answers all remaining requests in time on a device that is
    free.
    """
    if not rest:
        return True
    for rows in range(1, min(len(rest), size) + 1):
        for batch in itertools.combinations(sorted(rest), rows):
            end = max(free, arrivals[batch[-1]]) + cost(rows)
            on_time = end <= arrivals[batch[0]] + timeout + SLACK
            if on_time and fits(arrivals, rest.difference(batch), end, timeout, cost, size):
                return True
    return False


def fewest_by_trying(arrivals: list[float], timeout: float, cost: Cost, size: int) -> int:
    for missed in range(len(arrivals) + 1):
        for kept in itertools.combinations(range(len(arrivals)), len(arrivals) - missed):
            if fits(arrivals, frozenset(kept), 0.0, timeout, cost, size):
                return missed
    raise AssertionError("to miss all is always possible")


@pytest.mark.parametrize("seed", range(40))
def test_equals_trying_everything(seed: int) -> None:
    draw = random.Random(seed)
    cost = Cost(draw.uniform(0.5, 4), draw.uniform(0.1, 3), step=draw.choice((1, 1, 2)))
    rate = draw.choice((0.3, 0.8, 2.0))
    arrivals = list(itertools.accumulate(draw.expovariate(rate) for _ in range(6)))
    timeout = draw.uniform(3, 14)
    size = draw.choice((2, 3, 6))
    assert fewest_misses(arrivals, timeout, cost, size) == fewest_by_trying(arrivals, timeout, cost, size)


def test_a_batch_may_end_exactly_at_the_deadline() -> None:
    assert fewest_misses([1.0, 2.0], 2.0, Cost(1.0, 0.5), 2) == 0
    assert fewest_misses([1.0, 2.0], 1.999, Cost(1.0, 0.5), 2) == 1


def test_counts_no_further_than_asked() -> None:
    trace = GPU.trace(1.5, 500, 1)
    misses = fewest_misses(trace.arrivals, 0.025, GPU.cost, 128)
    assert misses is not None
    assert fewest_misses(trace.arrivals, 0.025, GPU.cost, 128, misses) == misses
    assert fewest_misses(trace.arrivals, 0.025, GPU.cost, 128, misses - 1) is None


def share_in_time(arrivals: list[float], timeout: float, cost: Cost, max_batch_size: int) -> float:
    """Return the largest share of requests that any schedule answers in time."""
    misses = fewest_misses(arrivals, timeout, cost, max_batch_size)
    assert misses is not None
    return 1 - misses / len(arrivals)


def test_long_overload_moves_the_table() -> None:
    """In long overload the device does little better than full batches, and the table moves many
    times.
    """
    trace = CPU.trace(3.0, 3000, 1)
    share = share_in_time(trace.arrivals, 0.1, CPU.cost, 16)
    assert (1 - share) * 3000 > 3 * MOVE
    assert share * 3000 / trace.duration / CPU.capacity == pytest.approx(1.01, abs=0.02)


@pytest.mark.parametrize("scenario", STUDY, ids=lambda s: f"{s.name}-{s.kind}")
@pytest.mark.parametrize("load", [0.4, 0.8, 1.2])
def test_no_policy_without_noise_beats_it(scenario: Scenario, load: float) -> None:
    trace = scenario.trace(load, 800, 21)
    bound = share_in_time(trace.arrivals, scenario.tightest, scenario.cost, scenario.max_batch_size)
    for name, scheduler in SCHEDULERS.items():
        record = run(trace, scenario, scheduler(scenario, trace), costs.silent)
        assert summarize(trace, record).in_time <= bound + 1e-12, name
