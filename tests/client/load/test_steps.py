"""Steps of a load, their parts and arrivals, traces, and histograms of latencies."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from tensorferry.client.load.histogram import LEAST_SECONDS, Histogram
from tensorferry.client.load.records import Plan
from tensorferry.client.load.steps import Arrival, BadOption, Step, concurrencies, rates, read_trace


def test_a_number_a_list_or_a_range_that_doubles() -> None:
    for text, expected in (
        ("8", [8]), ("1,8,32", [1, 8, 32]), ("1:256", [1, 2, 4, 8, 16, 32, 64, 128, 256]), ("3:20", [3, 6, 12, 20]), ("4:4", [4]),
    ):  # fmt: skip
        assert (
            [step.concurrency for step in concurrencies(text)]
            == [step.rate for step in rates(text)]
            == expected
        )
    assert rates("0.5") == (Step(rate=0.5),)


def test_what_is_no_concurrency_and_no_rate() -> None:
    for parse, texts in (
        (concurrencies, ("", "0", "1.5", "1,", "8:1", "1:2:3", "65537")),
        (rates, ("0", "nan", "inf", "a:b")),
    ):
        for text in texts:
            with pytest.raises(BadOption, match="expected"):
                parse(text)


def test_parts_share_a_step() -> None:
    plan = Plan(processes=4)
    assert [part.in_flight for part in plan.parts(Step(concurrency=2))] == [1, 1]
    parts = plan.parts(Step(concurrency=262))
    assert [(part.in_flight, part.connections) for part in parts] == [(66, 2), (66, 2), (65, 2), (65, 2)]
    assert [part.connections for part in plan.parts(Step(concurrency=256))] == [1, 1, 1, 1]
    assert {part.connections for part in Plan(connections=3).parts(Step(concurrency=1))} == {3}
    spread = Plan(processes=3, least_connections=8).parts(Step(rate=1.0))
    assert [part.connections for part in spread] == [3, 3, 3], "enough to reach all processes of the server"
    assert [part.in_flight for part in plan.parts(Step(rate=10.0))] == [0, 0, 0, 0]
    trace = (Arrival(0.0, 1), Arrival(1.0, 1), Arrival(2.0, 1))
    sent = [list(part.arrivals()) for part in Plan(processes=2, trace=trace).parts(Step())]
    assert sent == [[trace[0], trace[2]], [trace[1]]]


def test_constant_arrivals_of_all_processes_interleave() -> None:
    plan = Plan(arrivals="constant", rows=2, processes=3, requests=11)
    arrivals = [arrival for part in plan.parts(Step(rate=100)) for arrival in part.arrivals()]
    assert sorted(arrival.at for arrival in arrivals) == pytest.approx([number / 100 for number in range(11)])
    assert {arrival.rows for arrival in arrivals} == {2}


def test_poisson_arrivals_have_the_rate_and_the_spread() -> None:
    parts = Plan(processes=4, seed=7).parts(Step(rate=200))
    times = sorted(
        arrival.at
        for part in parts
        for arrival in itertools.takewhile(lambda arrival: arrival.at < 50, part.arrivals())
    )
    # The number within 50 s has a mean of 10,000 and a standard deviation of 100.
    assert 9_500 < len(times) < 10_500
    gaps = np.diff(times)
    # Independent arrivals: the standard deviation of a gap is its mean.
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1)


def test_arrivals_are_those_of_the_seed_and_differ_between_processes() -> None:
    def some(part: int, seed: int) -> list[Arrival]:
        return list(Plan(processes=2, seed=seed, requests=10).parts(Step(rate=10.0))[part].arrivals())

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
        ('{"at": 1' + 400 * "0" + "}", "for the seconds"),
        (100_000 * "[", "line 2: expected"),
        ('{"at": "1"}', "got '1' for the seconds"),
        ('{"at": NaN}', "got nan for the seconds"),
        ('{"at": 1, "rows": 0}', "got 0 for the rows"),
        ('{"at": 1, "rows": true}', "got True for the rows"),
        ('{"time": "x", "message": "", "method": "ModelInfer", "duration_seconds": 1}', "expected an ISO 8601 time, got 'x'"),
]  # fmt: skip


def test_a_wrong_line_is_named(tmp_path: Path) -> None:
    for line, text in WRONG_LINES:
        with pytest.raises(BadOption, match=re.escape(text)):
            read_trace(written(tmp_path / "t", '{"at": 1}', line), 1)
    with pytest.raises(BadOption, match="has no arrivals"):
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


def test_mean_least_and_most_are_exact_and_an_empty_histogram_has_no_figures() -> None:
    histogram = Histogram()
    histogram.add([])
    assert (histogram.count, histogram.mean, histogram.percentile(0.5)) == (0, None, None)
    histogram.add([0.003, 0.001, 0.002])
    assert (histogram.count, histogram.least, histogram.most) == (3, 0.001, 0.003)
    assert histogram.mean == pytest.approx(0.002)
    assert histogram.percentile(1.0) == 0.003


def test_values_outside_the_buckets_are_counted_at_the_ends() -> None:
    histogram = Histogram()
    histogram.add([1e-9, 1e9])
    assert sorted(histogram.sparse().values()) == [1, 1]
    assert histogram.percentile(0.5) == pytest.approx(LEAST_SECONDS, rel=0.005)
    assert histogram.percentile(1.0) == 1e9
