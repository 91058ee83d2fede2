"""Histograms with fixed intervals; a batcher counts each answered request in them."""

from __future__ import annotations

import math

import pytest
from batcher.conftest import Make
from hypothesis import given
from hypothesis import strategies as st
from support.batcher.rig import occupy, reproducible, results, takes

from tensorferry.batcher import BOUNDS, Histogram, interval_of
from tensorferry.batcher.statistics.histogram import INTERVALS, spread
from tensorferry.batcher.testing import ScriptedRunner, VirtualClock

SECONDS = st.floats(0, 100) | st.sampled_from(BOUNDS)


def test_the_bounds_ascend_and_are_documented() -> None:
    assert list(BOUNDS) == sorted(set(BOUNDS))
    assert (
        tuple(pytest.approx(step * 10.0**power) for power in range(-4, 2) for step in (1, 2.5, 5)) == BOUNDS
    )
    assert len(BOUNDS) + 1 == INTERVALS


@pytest.mark.parametrize(
    ("seconds", "interval"),
    [(-1e-9, 0), (0.0, 0), (0.0001, 0), (0.00011, 1), (1.0, 12), (50.0, 17), (50.1, 18), (math.inf, 18)],
)
def test_an_interval_includes_its_upper_bound(seconds: float, interval: int) -> None:
    assert interval_of(seconds) == interval


@reproducible
@given(st.lists(SECONDS, min_size=1, max_size=40), SECONDS)
def test_spread_with_an_offset_counts_each_time_once(times: list[float], less: float) -> None:
    """In the right interval, except for rounding at a bound."""
    found = spread(sorted(times), less)
    assert sum(count for _, count in found) == len(times)
    assert all(count >= 0 for _, count in found)
    lowest, highest = min(times) - less, max(times) - less
    assert interval_of(lowest) == found[0][0]
    assert interval_of(highest) == found[-1][0]


def counts_of(histogram: Histogram) -> dict[int, int]:
    return {interval: count for interval, count in enumerate(histogram.counts) if count}


def test_answered_requests_are_counted_with_their_times(make: Make, clock: VirtualClock) -> None:
    runner = ScriptedRunner(takes(clock, 0.2), gated=True)
    batcher = make(runner, clock=clock)
    first = occupy(batcher, runner)
    waits = [batcher.submit(1.0)]
    clock.advance(3.0)
    waits.append(batcher.submit(2.0))
    gone = batcher.submit(3.0)
    assert gone.cancel()
    runner.open()
    results([first, *waits])
    statistics = batcher.statistics()
    # The first ran for 3.2 s. The others waited for 3.2 and 0.2 s, and ran for 0.2 s.
    assert counts_of(statistics.latencies) == {interval_of(3.3): 2, interval_of(0.4): 1}
    assert counts_of(statistics.queue_delays) == {
        interval_of(0.0): 1,
        interval_of(3.2): 1,
        interval_of(0.2): 1,
    }
    assert counts_of(statistics.compute_times) == {interval_of(3.2): 1, interval_of(0.2): 2}
    for histogram in (statistics.latencies, statistics.queue_delays, statistics.compute_times):
        assert histogram.count == statistics.answered == 3
    assert statistics.latencies.sum == pytest.approx(3.2 + 3.4 + 0.4)
    assert statistics.queue_delays.sum == pytest.approx(3.2 + 0.2)
    assert statistics.compute_times.sum == pytest.approx(3.2 + 0.2 + 0.2)
