"""The arrival rate does not decrease after an ordinary gap, but does when arrivals end."""

from __future__ import annotations

import math
import random

import pytest

from tensorferry.batcher.learning.arrival_rate import ArrivalRates


def test_the_rate_is_unknown_before_the_second_arrival() -> None:
    rates = ArrivalRates(1)
    assert rates.demand(0, 1.0, 1).rows_per_second == 0.0
    rates.arrived(0, 1.0, 4, 0.1)
    assert (rates.demand(0, 1.0, 1).rows_per_second, rates.demand(0, 1.0, 1).typical_deadline) == (0.0, 0.1)


def test_the_rate_is_near_that_of_random_arrivals_at_any_time() -> None:
    """Also a long gap after the last arrival, as random gaps go."""
    draw = random.Random(1)
    rates, now, found = ArrivalRates(1), 0.0, []
    for _ in range(4000):
        gap = draw.expovariate(1000.0)
        found.append(rates.demand(0, now + gap * draw.random(), 1).rows_per_second)
        now += gap
        rates.arrived(0, now, 1, math.inf)
    found = sorted(found[200:])
    assert found[len(found) // 2] == pytest.approx(1000, rel=0.1)
    assert found[len(found) // 50] > 700


def test_the_rate_decreases_when_arrivals_end() -> None:
    rates = ArrivalRates(1)
    for arrival in range(200):
        rates.arrived(0, arrival * 0.001, 2, math.inf)
    assert rates.demand(0, 0.2, 1).rows_per_second == pytest.approx(2000, rel=0.1)
    assert rates.demand(0, 10.2, 1).rows_per_second < 15


def test_rows_are_counted_and_divided_by_the_workers() -> None:
    rates = ArrivalRates(1)
    for arrival in range(500):
        rates.arrived(0, arrival * 0.01, 8, math.inf)
    assert rates.demand(0, 5.0, 4).rows_per_second == pytest.approx(200, rel=0.05)
