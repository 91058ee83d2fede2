"""The product's queue in the simulation: it sheds few in overload, shares by weight, and no bound is exceeded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import costs
import pytest
from clairvoyant import fewest_misses
from engine import WARMUP_ROWS, run
from measure import SCHEDULERS
from policies import Peer
from scenarios import COMPLETING, CPU, GPU, PIPELINE, SLOW_FIRST, Scenario, two_classes
from shipping import Shipping
from stages import SEPARATE, run_stages
from summary import Summary, summarize


def play(
    scenario: Scenario, load: float, count: int, weights: tuple[int, ...] = (), rows: Sequence[int] = ()
) -> Summary:
    """Run a queue that knows the times of these sizes, by default of all."""
    trace = scenario.trace(load, count, 2)
    queue = Shipping(scenario, trace, weights=weights)
    known = rows or range(1, scenario.max_batch_size + 1)
    return summarize(trace, run(trace, scenario, queue, costs.noise(2), known))


@pytest.mark.parametrize("scenario", [GPU, CPU], ids=lambda scenario: scenario.name)
def test_works_at_nearly_the_offline_rate_in_overload(scenario: Scenario) -> None:
    assert play(scenario, 0.1, 500).in_time == 1.0
    got = play(scenario, 3.0, 3000, rows=WARMUP_ROWS)
    assert got.goodput > 0.85 * scenario.capacity
    assert got.late < 0.03


def test_is_greedy_where_there_are_no_deadlines() -> None:
    scenario = replace(CPU, timeouts=(1e6,))
    trace = scenario.trace(0.7, 500, 2)
    ours, greedy = (
        run(trace, scenario, scheduler, costs.noise(2))
        for scheduler in (Shipping(scenario, trace), Peer(scenario, trace))
    )
    assert ours == greedy


def test_several_devices_do_no_less_in_overload_than_as_many_single_ones() -> None:
    pair = replace(GPU, devices=2)
    alone, got = play(GPU, 1.2, 8000), play(pair, 1.2, 16_000)
    assert got.goodput / pair.capacity > 1.02 * alone.goodput / GPU.capacity


def test_the_higher_class_hardly_notices_the_lower_ones_overload() -> None:
    got = play(two_classes(GPU, 0.2, deadlines=True), 2.0, 3000, (8, 1))
    high, low = got.classes
    assert high.in_time > 0.99
    assert low.in_time > 0.25


def test_saturated_classes_share_the_rows_by_weight() -> None:
    high, low = play(two_classes(GPU, 0.5, deadlines=False), 4.0, 30_000, (3, 1)).classes
    assert high.throughput / low.throughput == pytest.approx(3, rel=0.1)


@pytest.mark.parametrize("scenario", [PIPELINE, COMPLETING], ids=["before", "before and after"])
def test_a_noisy_pipeline_keeps_its_device_busy(scenario: Scenario) -> None:
    got = play(scenario, 0.8, 3000)
    assert got.idle < 0.01
    assert got.in_time > 0.99


def test_stages_that_know_of_each_other_answer_more_in_time() -> None:
    trace = SLOW_FIRST.trace(2.0, 1500, 1)
    shares = [
        summarize(trace, run_stages(trace, SLOW_FIRST, policy, costs.noise(1))).in_time
        for policy in ("greedy", SEPARATE, "tensorferry")
    ]
    assert shares == sorted(shares)
    assert shares[2] > 1.2 * shares[1]


def test_every_policy_ends_each_request_once_and_none_beats_the_clairvoyant_optimum() -> None:
    """`run` raises if a request is lost or ended twice."""
    trace = GPU.trace(1.2, 800, 21)
    misses = fewest_misses(trace.arrivals, GPU.tightest, GPU.cost, GPU.max_batch_size)
    assert misses is not None
    for name, scheduler in SCHEDULERS.items():
        record = run(trace, GPU, scheduler(GPU, trace), costs.silent)
        assert summarize(trace, record).in_time <= 1 - misses / 800 + 1e-12, name
