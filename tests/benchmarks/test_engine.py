"""The simulation: completion times, no lost request, and its traces."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

import costs
import pytest
from costs import Cost, Line
from engine import Run, Step, Times, run
from measure import SCHEDULERS
from policies import (
    BentoStyle,
    FourEager,
    NexusStyle,
    Peer,
    StrictPriority,
    TritonStyle,
    TwoEager,
    WindowFromArrival,
    WindowFromPop,
)
from scenarios import BEYOND, COMPLETING, CPU, GPU, PIPELINE, STUDY, Scenario, two_classes
from shipping import Shipping
from summary import Summary, summarize
from traces import Trace

# Batches of up to 4 rows take 2 s + 1 s per row.
SMALL = replace(CPU, cost=Cost(2.0, 1.0), max_batch_size=4, timeouts=(100.0,), window=3.0, preferred=(2, 4))


def play(policy: type[Peer], arrivals: list[float], *, timeout: float = 100.0, devices: int = 1) -> Run:
    scenario = replace(SMALL, timeouts=(timeout,), devices=devices)
    trace = Trace(arrivals, [arrival + timeout for arrival in arrivals], [0] * len(arrivals))
    return run(trace, scenario, policy(scenario, trace), costs.silent)


def test_greedy_takes_all_queued_requests_when_the_device_is_free() -> None:
    assert play(Peer, [0.0, 1.0, 2.0, 10.0]).answered == [3.0, 7.0, 7.0, 13.0]


def test_a_batch_takes_no_more_than_its_size() -> None:
    assert play(Peer, [0.0, 1.0, 1.0, 1.0, 1.0, 1.0]).batches == [1, 4, 1]


def test_devices_share_the_queue() -> None:
    assert play(Peer, [0.0, 1.0, 2.0], devices=2).answered == [3.0, 4.0, 6.0]


def stages(
    policy: type[Peer],
    arrivals: list[float],
    before: float,
    after: float,
) -> Run:
    """Greedy policies on devices whose host part takes `before` and `after`."""
    scenario = replace(SMALL, before=Cost(before, 0.0), after=Cost(after, 0.0))
    trace = Trace(arrivals, [math.inf] * len(arrivals), [0] * len(arrivals))
    return run(trace, scenario, policy(scenario, trace), costs.silent)


def test_a_batch_is_prepared_run_and_completed() -> None:
    """First 1 + 3 + 0.5 s; then the two requests waiting since 1 take 1 + 4 + 0.5 s from 4.5. The
    device is idle from 4.
    """
    got = stages(Peer, [0.0, 1.0, 1.0], 1.0, 0.5)
    assert got.answered == [4.5, 10.0, 10.0]
    assert (got.busy, got.idle, got.early) == (7.0, 1.5, 0.0)


def test_of_two_in_flight_one_is_prepared_while_the_device_runs_the_other() -> None:
    """The second is prepared from 1 to 2 and waits until 4. The third closes at 4.5, is prepared at
    5.5 and waits until 7.
    """
    got = stages(TwoEager, [0.0, 1.0, 2.0], 1.0, 0.5)
    assert got.answered == [4.5, 7.5, 10.5]
    assert (got.busy, got.idle) == (9.0, 0.0)
    assert got.early == pytest.approx((0 + 2 + 1.5) / 3)


def test_more_in_flight_only_wait_for_the_device_and_split_the_batches() -> None:
    arrivals = [0.0, 0.1, 0.2, 0.3]
    assert stages(FourEager, arrivals, 1.0, 0.0).answered == [4.0, 7.0, 10.0, 13.0]
    assert stages(TwoEager, arrivals, 1.0, 0.0).answered == [4.0, 7.0, 11.0, 11.0]
    assert stages(Peer, arrivals, 1.0, 0.0).answered == [4.0, 10.0, 10.0, 10.0]


def test_the_shipping_queue_prepares_the_next_batch_just_in_time() -> None:
    """Once the preparation time of 1 s is known, a batch closes 1 s and 0.3 ms before the device is
    free.

    The second closes at 2.9997: nothing is known of the host, and the device, busy from 1 to 4,
    should be free at 3. The third closes at 6.9997, by the duration of the batch before it. From
    the fourth on, the device never waits.
    """
    scenario = replace(SMALL, before=Cost(1.0, 0.0), max_batch_size=1)
    trace = Trace([0.0, 0.5, 4.5, 4.6, 4.7], [math.inf] * 5, [0] * 5)
    got = run(trace, scenario, Shipping(scenario, trace), costs.silent)
    assert got.answered == pytest.approx([4.0, 7.0, 10.9997, 13.9997, 16.9997], abs=1e-9)
    assert got.idle == pytest.approx(0.9997)


def test_without_own_buckets_strict_priority_mixes_classes_in_their_order() -> None:
    scenario = replace(SMALL, classes=(0.5, 0.5))
    trace = Trace([0.0] + [1.0] * 6, [100.0] * 7, [0] * 7, [1, 1, 1, 0, 0, 1, 1])
    got = run(trace, scenario, StrictPriority(scenario, trace), costs.silent)
    assert got.answered == [3.0, 9.0, 9.0, 9.0, 9.0, 13.0, 13.0]


def test_windows_from_arrival_and_from_pop() -> None:
    """The second request waits from 1 to 6 for the device; only one of the two windows counts that."""
    assert play(WindowFromArrival, [0.0, 1.0]).answered == [7.0, 7.0]
    assert play(WindowFromArrival, [0.0, 4.0]).answered == [6.0, 10.0]
    assert play(WindowFromPop, [0.0, 4.0]).answered == [6.0, 12.0]


def test_triton_style_closes_at_a_preferred_size_or_after_the_delay() -> None:
    assert play(TritonStyle, [0.0, 1.0]).answered == [5.0, 5.0]
    assert play(TritonStyle, [0.0]).answered == [4.5]


def test_bento_style_drops_heads_that_the_whole_queue_delays() -> None:
    """At 3 the ten requests have 7 s left and would need 12 s together; only four of them need less."""
    got = play(BentoStyle, [0.0] + [1.0] * 10, timeout=9.0)
    assert [math.isnan(end) for end in got.answered] == [False] + [True] * 6 + [False] * 4


def test_nexus_style_slides_past_heads_without_time_for_the_target() -> None:
    """The target is 2, and two batches of 4 s fit into 9 s. At 3 the second request, due at 9.5, fits;
    at 4.5 it does not.
    """
    assert play(NexusStyle, [0.0, 0.5, 0.5], timeout=9.0).dropped == pytest.approx(
        [math.nan] * 3, nan_ok=True
    )
    assert play(NexusStyle, [0.0, 0.5], timeout=5.5).dropped[1] == 3.0


NEW = [
    PIPELINE,
    COMPLETING,
    replace(COMPLETING, devices=2),
    replace(GPU, devices=3),
    two_classes(GPU, 0.5, deadlines=True),
    two_classes(CPU, 0.2, deadlines=True, own_buckets=True),
    two_classes(CPU, 0.5, deadlines=False),
]


@pytest.mark.parametrize("scenario", [*STUDY, *BEYOND, *NEW], ids=lambda s: f"{s.name}-{s.kind}")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_request_is_answered_or_dropped_once(scenario: Scenario, name: str) -> None:
    trace = scenario.trace(1.3, 400, 5)
    scheduler = SCHEDULERS[name](scenario, trace)
    got = run(trace, scenario, scheduler, costs.noise(5))
    outcomes = list(zip(trace.arrivals, got.answered, got.dropped, strict=True))
    assert all((answered == answered) != (dropped == dropped) for _, answered, dropped in outcomes)
    assert all(answered > arrival for arrival, answered, _ in outcomes if answered == answered)
    assert all(dropped >= arrival for arrival, _, dropped in outcomes if dropped == dropped)
    assert sum(got.batches) == sum(answered == answered for _, answered, _ in outcomes)
    assert max(got.batches) <= scenario.max_batch_size
    elapsed = max(filter(math.isfinite, got.answered)) - trace.arrivals[0]
    assert got.busy <= scenario.devices * elapsed * (1 + 1e-9)


def test_a_policy_that_loses_a_request_is_detected() -> None:
    class Forgetful(Peer):
        def put(self, index: int, now: float) -> bool:
            return index == 1 or super().put(index, now)

        def poll(self, now: float, device: int | None) -> Step:
            return super().poll(now, device)

        def ran(self, batch: Sequence[int], device: int, times: Times, now: float) -> None:
            pass

    with pytest.raises(RuntimeError, match="1 of 3 requests were not answered or dropped exactly once"):
        play(Forgetful, [0.0, 1.0, 2.0])


def test_classes_are_summed_up_each_for_itself() -> None:
    trace = Trace([0.0, 1.0, 2.0], [4.0, 5.0, 6.0], [0] * 3, [1, 0, 1])
    got = summarize(trace, Run([2.0, 6.0, math.nan], [math.nan, math.nan, 5.0], [2], 6.0, 2.0, 0.5))
    high, low = got.classes
    assert (high.in_time, high.late, high.mean) == (0.0, 1.0, 5.0)
    assert (low.in_time, low.dropped, low.mean) == (0.5, 0.5, 2.0)
    assert (got.idle, got.early, got.throughput) == (0.25, 0.5, 0.5)


def test_the_average_of_summaries_is_that_of_each_number() -> None:
    one, other = (Summary(x, 2 * x, classes=(Summary(3 * x, 0.0),)) for x in (0.2, 0.4))
    got = Summary.average([one, other])
    assert (got.in_time, got.goodput, got.classes[0].in_time) == pytest.approx((0.3, 0.6, 0.9))


def test_summary_counts_a_drop_as_a_miss_and_a_late_answer_as_wasted() -> None:
    trace = Trace([0.0, 1.0, 2.0, 5.0], [4.0, 5.0, 6.0, 9.0], [0] * 4)
    got = summarize(trace, Run([2.0, 6.0, math.nan, 9.0], [math.nan, math.nan, 5.0, math.nan], [1, 2], 7.0))
    assert (got.in_time, got.late, got.dropped) == (0.5, 0.25, 0.25)
    assert (got.goodput, got.time_to_drop, got.mean_batch) == (0.4, 3.0, 1.5)
    assert got.mean == pytest.approx(11 / 3)
    assert (got.p50, got.p99) == (4.0, 5.0)


@pytest.mark.parametrize("scenario", [*STUDY, *BEYOND], ids=lambda s: f"{s.name}-{s.kind}")
def test_traces_repeat_and_have_the_rate_that_was_asked_for(scenario: Scenario) -> None:
    trace = scenario.trace(0.5, 20_000, 3)
    assert trace == scenario.trace(0.5, 20_000, 3)
    assert 20_000 / trace.duration == pytest.approx(0.5 * scenario.capacity, rel=0.15)
    assert trace.arrivals == sorted(trace.arrivals)


def test_offline_rate_is_that_of_full_batches() -> None:
    assert GPU.capacity == pytest.approx(128 / 0.0168)
    assert replace(GPU, devices=4).capacity == pytest.approx(4 * 128 / 0.0168)
    halves = replace(GPU, cost=Cost(0.004, 0.0001, scales=(1.0, 3.0)), buckets=(1.0, 1.0))
    assert halves.capacity == pytest.approx(128 / 0.0168 / 2)


def test_staircase_rounds_rows_up() -> None:
    assert [Cost(1.0, 1.0, step=4)(rows) for rows in (1, 4, 5)] == [5.0, 5.0, 9.0]


def test_noise_is_small_but_for_stalls() -> None:
    factor = costs.noise(1)
    factors = sorted(factor() for _ in range(20_000))
    assert statistics.median(factors) == pytest.approx(1, abs=0.005)
    assert sum(x > 1.6 for x in factors) == pytest.approx(40, abs=25)


def test_line_finds_the_costs_despite_a_stall_and_follows_a_change() -> None:
    line = Line()
    for rows in (1, 4, 16):
        line.anchor(rows, 2 + rows)
    line.observe(8, 100.0)
    assert line.mean(8) < 13
    for rows in (2, 4, 8, 16) * 50:
        line.observe(rows, 4 + 2 * rows)
    assert line.mean(8) == pytest.approx(20, rel=0.03)
    assert line.padded(8) > line.mean(8)
