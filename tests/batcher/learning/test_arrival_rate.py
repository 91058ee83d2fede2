"""The arrival rate does not decrease after an ordinary gap, but does when arrivals end."""

from __future__ import annotations

import math
import random

import pytest

from tensorferry.batcher.learning.arrival_rate import ArrivalRateMeter


def test_the_rate_is_unknown_before_the_second_arrival() -> None:
    meter = ArrivalRateMeter()
    assert meter.demand(1.0, 1).rows_per_second == 0.0
    meter.arrived(1.0, 4, 0.1)
    assert (meter.demand(1.0, 1).rows_per_second, meter.demand(1.0, 1).typical_deadline) == (0.0, 0.1)


def test_the_rate_is_near_that_of_random_arrivals_at_any_time() -> None:
    """Also a long gap after the last arrival, as random gaps go."""
    draw = random.Random(1)
    meter, now, rates = ArrivalRateMeter(), 0.0, []
    for _ in range(4000):
        gap = draw.expovariate(1000.0)
        rates.append(meter.demand(now + gap * draw.random(), 1).rows_per_second)
        now += gap
        meter.arrived(now, 1, math.inf)
    rates = sorted(rates[200:])
    assert rates[len(rates) // 2] == pytest.approx(1000, rel=0.1)
    assert rates[len(rates) // 50] > 700


def test_the_rate_decreases_when_arrivals_end() -> None:
    meter = ArrivalRateMeter()
    for arrival in range(200):
        meter.arrived(arrival * 0.001, 2, math.inf)
    assert meter.demand(0.2, 1).rows_per_second == pytest.approx(2000, rel=0.1)
    assert meter.demand(10.2, 1).rows_per_second < 15


def test_rows_are_counted_and_divided_by_the_workers() -> None:
    meter = ArrivalRateMeter()
    for arrival in range(500):
        meter.arrived(arrival * 0.01, 8, math.inf)
    assert meter.demand(5.0, 4).rows_per_second == pytest.approx(200, rel=0.05)
