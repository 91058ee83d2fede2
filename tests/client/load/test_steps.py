"""Steps of a load, their arrivals, traces, and histograms of latencies."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from tensorferry.client.load.histogram import GROWTH, LEAST_SECONDS, Histogram, lower_bound
from tensorferry.client.load.steps import (
    Arrival,
    BadLoad,
    Step,
    arrivals_of,
    concurrencies,
    rates,
    share,
)
from tensorferry.client.load.trace import BadTrace, read_trace


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8", [8]),
        ("1,8,32", [1, 8, 32]),
        ("1:256", [1, 2, 4, 8, 16, 32, 64, 128, 256]),
        ("3:20", [3, 6, 12, 20]),
        ("4:4", [4]),
    ],
)
def test_concurrencies(text: str, expected: list[int]) -> None:
    assert concurrencies(text) == tuple(Step(concurrency=number) for number in expected)


def test_rates() -> None:
    assert rates("0.5") == (Step(rate=0.5),)
    assert [step.rate for step in rates("100:500")] == [100, 200, 400, 500]


def test_what_is_no_concurrency_and_no_rate() -> None:
    for parse, texts in (
        (concurrencies, ("", "0", "1.5", "1,", "8:1", "1:2:3", "65537")),
        (rates, ("0", "nan", "inf", "a:b")),
    ):
        for text in texts:
            with pytest.raises(BadLoad, match="expected"):
                parse(text)


def test_shares_add_up_and_differ_by_at_most_one() -> None:
    shares = [share(7, 3, part) for part in range(3)]
    assert sum(shares) == 7
    assert max(shares) - min(shares) <= 1


def test_constant_arrivals_of_all_processes_interleave() -> None:
    parts = [itertools.islice(arrivals_of("constant", 100, 2, 3, part, 1), 4) for part in range(3)]
    times = sorted(arrival.at for part in parts for arrival in part)
    assert times == pytest.approx([number / 100 for number in range(12)])


def test_poisson_arrivals_have_the_rate_and_the_spread() -> None:
    merged = [
        arrival
        for part in range(4)
        for arrival in itertools.takewhile(
            lambda arrival: arrival.at < 50, arrivals_of("poisson", 200, 1, 4, part, 7)
        )
    ]
    # The number within 50 s has a mean of 10,000 and a standard deviation of 100.
    assert 9_500 < len(merged) < 10_500
    times = sorted(arrival.at for arrival in merged)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    # Independent arrivals: the standard deviation of a gap is its mean.
    assert variance**0.5 == pytest.approx(mean, rel=0.1)


def test_arrivals_are_those_of_the_seed_and_differ_between_processes() -> None:
    def some(part: int, seed: int) -> list[Arrival]:
        return list(itertools.islice(arrivals_of("poisson", 10, 1, 2, part, seed), 5))

    assert some(0, 1) == some(0, 1)
    assert len({some(part, seed)[0].at for part in range(2) for seed in range(3)}) == 6


# Traces


def written(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines))
    return path


def test_lines_of_seconds_and_rows(tmp_path: Path) -> None:
    path = written(
        tmp_path / "t", '{"at": 10.5, "rows": 4}', "", '{"at": 10}', '{"at": 12, "rows": 1, "x": 0}'
    )
    assert read_trace(path, 2) == (Arrival(0.0, 2), Arrival(0.5, 4), Arrival(2.0, 1))


def test_lines_of_the_access_log(tmp_path: Path) -> None:
    def line(time: str, **fields: object) -> str:
        return json.dumps({"time": time, "message": "method=ModelInfer", **fields})

    path = written(
        tmp_path / "log",
        line("2026-11-23T12:00:00.000Z", level="info"),
        line("2026-11-23T12:00:01.500Z", method="ModelInfer", duration_seconds=0.5, rows=3),
        line("2026-11-23T12:00:02.000Z", method="ModelInfer", duration_seconds=0.75, rows=2),
        line("2026-11-23T12:00:02.000Z", method="ModelInfer", duration_seconds=0.0, rows=None),
    )
    arrivals = read_trace(path, 1)
    assert [arrival.rows for arrival in arrivals] == [3, 2, 1]
    assert [arrival.at for arrival in arrivals] == pytest.approx([0, 0.25, 1])


WRONG_LINES = [
        ("nonsense", "line 2: expected"),
        ("[1]", "line 2: expected"),
        ('{"rows": 1}', "got None for the seconds"),
        ('{"at": "1"}', "got '1' for the seconds"),
        ('{"at": NaN}', "got nan for the seconds"),
        ('{"at": 1, "rows": 0}', "got 0 for the rows"),
        ('{"at": 1, "rows": true}', "got True for the rows"),
        ('{"time": "x", "message": "", "method": "ModelInfer", "duration_seconds": 1}', "expected an ISO 8601 time, got 'x'"),
]  # fmt: skip


def test_a_wrong_line_is_named(tmp_path: Path) -> None:
    for line, text in WRONG_LINES:
        with pytest.raises(BadTrace, match=re.escape(text)):
            read_trace(written(tmp_path / "t", '{"at": 1}', line), 1)
    with pytest.raises(BadTrace, match="has no arrivals"):
        read_trace(written(tmp_path / "t", '{"message": "started"}'), 1)


# Histograms


def test_percentiles_are_within_half_a_percent() -> None:
    values = np.random.default_rng(1).lognormal(-6, 1.5, 20_000)
    histogram = Histogram()
    histogram.add(values[:7000].tolist())
    histogram.add(values[7000:].tolist())
    for part in (0.001, 0.5, 0.99, 1.0):
        exact = np.sort(values)[math.ceil(part * len(values)) - 1]
        assert histogram.percentile(part) == pytest.approx(exact, rel=0.005)


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
