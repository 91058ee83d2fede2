"""Ratios of the serving benchmark: within a round, their median, and their targets."""

from __future__ import annotations

from typing import Any

import pytest

from serving.plan import ONE_STREAM, OPEN, RAW, UNARY
from serving.reporting.ratios import (
    Ratio,
    all_ratios,
    divided,
    figures,
    of_raw,
    seen_text,
    table,
    wanted_text,
)
from serving.servers import ECHO, LANE, TRITON


def row(
    number: int, server: str, workload: str, pattern: str, in_flight: int, **figures: Any
) -> dict[str, Any]:
    return {
        "round": number,
        "server": server,
        "workload": workload,
        "pattern": pattern,
        "in_flight": in_flight,
        "share": 0.0,
        **figures,
    }


def raw(number: int, workload: str, rows: int, rate: float) -> dict[str, Any]:
    return {
        "round": number,
        "server": RAW,
        "workload": workload,
        "rows": rows,
        "rate": rate,
        "batch_seconds": rows / rate,
    }


def test_only_figures_of_the_same_round_are_divided() -> None:
    assert divided({0: 10.0, 1: 30.0, 2: 8.0}, {0: 5.0, 2: 2.0, 3: 1.0}) == [2.0, 4.0]


def test_a_figure_is_found_by_all_that_names_it() -> None:
    rows = [
        row(0, LANE, "tiny", UNARY, 32, rate=100.0),
        row(0, LANE, "tiny", UNARY, 128, rate=200.0),
        row(0, LANE, "mlp", UNARY, 32, rate=300.0),
        row(0, ECHO, "tiny", UNARY, 32, rate=400.0),
        row(0, LANE, "tiny", ONE_STREAM, 32, rate=500.0),
        {**row(0, LANE, "tiny", UNARY, 32, rate=600.0), "share": 0.5},
        raw(0, "tiny", 32, 700.0),
    ]
    assert figures(rows, LANE, "tiny", UNARY, 32) == {0: 100.0}


@pytest.mark.parametrize(
    ("values", "at_most", "verdict"),
    [
        ([2.0, 2.6, 9.0], False, "yes"),
        ([2.0, 2.4, 9.0], False, "no"),
        ([2.4], True, "yes"),
        ([2.6], True, "no"),
        ([], False, "not measured"),
    ],
)
def test_the_median_of_the_rounds_meets_the_target_or_not(
    values: list[float], at_most: bool, verdict: str
) -> None:
    assert Ratio("a", "b", 2.5, values, at_most).verdict == verdict


def test_a_ratio_is_shown_with_its_spread() -> None:
    ratio = Ratio("a", "b", 2.5, [3.0, 2.0, 4.0])
    assert seen_text(ratio) == "3.00 (2.00–4.00)"
    assert wanted_text(ratio) == "≥ 2.5"
    assert wanted_text(Ratio("a", "b", 0.9, [], at_most=True)) == "≤ 0.9"
    assert seen_text(Ratio("a", "b", 0.9, [])) == "–"


def test_a_model_is_compared_with_onnx_runtime_in_batches_of_its_own_mean_size() -> None:
    rows = [
        row(0, LANE, "transformer", UNARY, 32, rate=190.0, mean_rows=15.6),
        raw(0, "transformer", 16, 200.0),
        raw(0, "transformer", 32, 100.0),
        row(1, LANE, "transformer", UNARY, 32, rate=190.0, mean_rows=31.0),
        raw(1, "transformer", 32, 100.0),
    ]
    assert of_raw(rows, "transformer", 32) == [0.95]


def test_latency_in_the_open_loop_is_in_batch_times() -> None:
    rows = [
        {**row(0, LANE, "mlp", OPEN, 0, p99_ms=20.0), "share": 0.5},
        raw(0, "mlp", 32, 3200.0),
    ]
    seen = [ratio for ratio in all_ratios(rows) if ratio.values]
    assert [(ratio.name, ratio.values) for ratio in seen] == [
        ("p99 at 50 % of capacity, open loop, MLP", [2.0])
    ]


def test_the_tail_of_an_open_loop_near_capacity_is_in_milliseconds() -> None:
    rows = [{**row(0, LANE, "tiny", OPEN, 0, p99_ms=7.0), "share": 0.8}]
    (seen,) = [ratio for ratio in all_ratios(rows) if ratio.values]
    assert (seen.name, seen.over, seen.values) == ("p99 at 80 % of capacity, open loop, tiny", "1 ms", [7.0])


def test_the_table_shows_measured_ratios_and_counts_the_rest() -> None:
    rows = [row(0, LANE, "tiny", UNARY, 32, rate=300.0), row(0, TRITON, "tiny", UNARY, 32, rate=100.0)]
    header, line, rest = table(all_ratios(rows)).splitlines()
    assert header.split()[0] == "figure"
    assert "÷ Triton, no window" in line
    assert line.split()[-2:] == ["(3.00–3.00)", "yes"]
    assert rest == f"({len(all_ratios(rows)) - 1} not measured)"
