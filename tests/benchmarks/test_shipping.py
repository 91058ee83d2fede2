"""The product's queue in the simulation: it answers all at low load, and sheds few in overload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import costs
import pytest
from engine import WARMUP_ROWS, run
from policies import Peer
from scenarios import BEYOND, COMPLETING, CPU, GPU, PIPELINE, STUDY, Scenario, two_classes
from shipping import Shipping
from summary import Summary, summarize


def play(
    scenario: Scenario,
    load: float,
    count: int,
    weights: tuple[int, ...] = (),
    known_rows: Sequence[int] | None = None,
) -> Summary:
    """Run a queue that knows the times of all sizes by earlier traffic, or of `known_rows`."""
    trace = scenario.trace(load, count, 2)
    queue = Shipping(scenario, trace, weights=weights)
    rows = range(1, scenario.max_batch_size + 1) if known_rows is None else known_rows
    return summarize(trace, run(trace, scenario, queue, costs.noise(2), rows))


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


@pytest.mark.parametrize("load", [1.5, 3.0])
@pytest.mark.parametrize("scenario", [s for s in STUDY if s.kind == "Poisson"], ids=lambda s: s.name)
def test_learns_the_sizes_that_a_load_does_not_run_in_overload(scenario: Scenario, load: float) -> None:
    got = play(scenario, load, 3000, known_rows=WARMUP_ROWS)
    assert got.goodput > 0.85 * scenario.capacity
    assert got.late < 0.03


@pytest.mark.parametrize("scenario", [s for s in BEYOND if s.cost.step > 1], ids=lambda s: s.name)
def test_learns_staircases_while_it_sheds(scenario: Scenario) -> None:
    got = play(scenario, 1.2, 8000)
    assert got.goodput > 0.87 * scenario.capacity
    assert got.late < 0.005


@pytest.mark.parametrize("number", [2, 4])
def test_several_devices_do_no_less_in_overload_than_as_many_single_ones(number: int) -> None:
    several = replace(GPU, devices=number)
    alone, got = play(GPU, 1.2, 8000), play(several, 1.2, 8000 * number)
    assert got.goodput / several.capacity > 1.02 * alone.goodput / GPU.capacity
    assert got.late < 0.01


def test_is_greedy_where_there_are_no_deadlines() -> None:
    """Without a window a batch takes all waiting requests, so the answers equal those of the greedy
    peer.
    """
    scenario = replace(CPU, timeouts=(1e6,))
    trace = scenario.trace(0.7, 500, 2)
    ours, greedy = (
        run(trace, scenario, scheduler, costs.noise(2))
        for scheduler in (Shipping(scenario, trace), Peer(scenario, trace))
    )
    assert ours == greedy


@pytest.mark.parametrize("device", [GPU, CPU], ids=lambda s: s.name)
@pytest.mark.parametrize("load", [1.2, 2.0])
def test_the_higher_class_hardly_notices_the_lower_ones_overload(device: Scenario, load: float) -> None:
    """The oldest request of the higher class is served even when it is the lower class's turn."""
    got = play(two_classes(device, 0.2, deadlines=True), load, 3000, (8, 1))
    high, low = got.classes
    assert high.in_time > 0.99
    assert low.in_time > 0.25
    assert got.goodput > 0.87 * device.capacity


def test_classes_with_buckets_of_their_own_take_turns() -> None:
    """At each turn the higher class has only a small batch; if it were always served first, the lower
    class would starve.
    """
    got = play(two_classes(GPU, 0.2, deadlines=False, own_buckets=True), 0.8, 3000, (8, 1))
    high, low = got.classes
    assert high.mean < 0.02
    assert low.throughput > 0.5 * GPU.capacity


@pytest.mark.parametrize("weights", [(1, 1), (3, 1), (8, 1)])
def test_saturated_classes_share_the_rows_by_weight(weights: tuple[int, int]) -> None:
    got = play(two_classes(GPU, 0.5, deadlines=False), 4.0, 30_000, weights)
    high, low = got.classes
    assert high.throughput / low.throughput == pytest.approx(weights[0] / weights[1], rel=0.1)


def test_a_pipeline_hides_the_hosts_part() -> None:
    """The study without noise: 18.1 ms on average with one worker, 13.2 ms with the next batch just in
    time.
    """
    patient = replace(PIPELINE, timeouts=(1e6,))
    trace = patient.trace(0.8, 4000, 2)
    serial, ours = (
        summarize(trace, run(trace, patient, Shipping(patient, trace, pipelined=pipelined), costs.silent))
        for pipelined in (False, True)
    )
    assert (serial.mean, ours.mean) == pytest.approx((0.0181, 0.0132), rel=0.05)
    assert serial.idle > 0.1
    assert ours.idle < 0.005
    assert ours.early < 0.001


@pytest.mark.parametrize("scenario", [PIPELINE, COMPLETING], ids=["before", "before and after"])
def test_a_noisy_pipeline_keeps_its_device_busy(scenario: Scenario) -> None:
    got = play(scenario, 0.8, 3000)
    assert got.idle < 0.01
    assert got.in_time > 0.99


class Stall:
    """Batch times without noise, except for one batch that takes `factor` times as long."""

    def __init__(self, at: int, factor: float) -> None:
        self._left = at
        self._factor = factor

    def __call__(self) -> float:
        self._left -= 1
        return self._factor if not self._left else 1.0


def test_a_stalled_batch_delays_only_itself_and_the_next() -> None:
    """The next batch closed just in time before the stall; later batches have fresh requests."""
    # For each batch the host's time is drawn, then the device's; before, two for each known size.
    trace = PIPELINE.trace(1.2, 6000, 2)
    sizes = range(1, PIPELINE.max_batch_size + 1)
    stall = Stall(2 * len(sizes) + 2 * 20, 2.0)
    record = run(trace, PIPELINE, Shipping(PIPELINE, trace), stall, sizes)
    late = sum(
        answered > deadline for answered, deadline in zip(record.answered, trace.deadlines, strict=True)
    )
    assert 0 < late <= 2 * PIPELINE.max_batch_size
