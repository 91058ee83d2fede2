from __future__ import annotations

import math

import numpy as np
import pytest

from tensorferry.client.load.histogram import GROWTH, LEAST_SECONDS, Histogram, lower_bound


@pytest.mark.parametrize("share", [0.001, 0.5, 0.99, 1.0])
def test_percentiles_are_within_half_a_percent(share: float) -> None:
    values = np.random.default_rng(1).lognormal(-6, 1.5, 20_000)
    histogram = Histogram()
    histogram.add(values[:7000].tolist())
    histogram.add(values[7000:].tolist())
    exact = np.sort(values)[math.ceil(share * len(values)) - 1]
    assert histogram.percentile(share) == pytest.approx(exact, rel=0.005)


def test_mean_least_and_most_are_exact() -> None:
    histogram = Histogram()
    histogram.add([0.003, 0.001, 0.002])
    assert (histogram.count, histogram.least, histogram.most) == (3, 0.001, 0.003)
    assert histogram.mean == pytest.approx(0.002)
    assert histogram.percentile(1.0) == 0.003


def test_an_empty_histogram_has_no_figures() -> None:
    histogram = Histogram()
    histogram.add([])
    assert (histogram.count, histogram.mean, histogram.percentile(0.5)) == (0, None, None)
    assert histogram.sparse() == {}


def test_values_outside_the_buckets_are_counted_at_the_ends() -> None:
    histogram = Histogram()
    histogram.add([1e-9, 1e9])
    assert sorted(histogram.sparse().values()) == [1, 1]
    assert histogram.percentile(0.5) == pytest.approx(LEAST_SECONDS, rel=0.005)
    assert histogram.percentile(1.0) == 1e9


def test_merging_is_adding_all_values() -> None:
    values = [0.001, 0.01, 0.02, 0.5]
    whole, one, other = Histogram(), Histogram(), Histogram()
    whole.add(values)
    one.add(values[:1])
    other.add(values[1:])
    one.merge(other)
    copied = Histogram.of(one.sparse(), one.total, one.least, one.most)
    for histogram in (one, copied):
        assert histogram.sparse() == whole.sparse()
        assert (histogram.least, histogram.most) == (0.001, 0.5)
        assert histogram.mean == pytest.approx(whole.mean)


def test_a_bucket_holds_what_lies_between_its_bounds() -> None:
    histogram = Histogram()
    histogram.add([lower_bound(700) * math.sqrt(GROWTH)])
    assert histogram.sparse() == {700: 1}
