"""The plan of the serving benchmark, and the page made from its results."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from serving.plan import OPEN, RAW, UNARY, full_round, quick_round
from serving.reporting import tables
from serving.reporting.report import generated
from serving.servers import ECHO, LANE, SLOW_PEERS, servers

ROW = {
    "workload": "tiny",
    "pattern": UNARY,
    "share": 0.0,
    "answers": 10,
    "errors": 0,
    "unanswered": 0,
    "p50_ms": 1.0,
    "p99_ms": 2.0,
    "cpu_us_per_answer": 50.0,
    "mean_rows": 0.0,
    "memory_mib": 80.0,
    "start_seconds": 0.5,
    "other_cores": 0.0,
    "offered": 0.0,
}


def rows() -> list[dict[str, Any]]:
    found = []
    for number, lane in enumerate((300.0, 500.0, 400.0)):
        found += [
            {**ROW, "round": number, "server": LANE, "in_flight": 32, "rate": lane, "mean_rows": 16.0},
            {**ROW, "round": number, "server": ECHO, "in_flight": 32, "rate": 100.0},
            {
                "round": number,
                "server": RAW,
                "workload": "tiny",
                "rows": 32,
                "rate": 1e6,
                "batch_seconds": 1e-6,
            },
        ]
    return found


def results() -> dict[str, Any]:
    return {
        "date": "2026-11-21",
        "command": "make bench",
        "rounds": 3,
        "minutes": 30.0,
        "machine": {
            "processor": "a processor",
            "cores": 2,
            "memory_gib": 24,
            "system": "Linux 6",
            "python": "3.11",
            "versions": {"grpcio": "1.85"},
            "peers": {"mosec": "mosec==0.9.8 numpy"},
        },
        "measurements": rows(),
        "missing": ["Ray Serve"],
        "failures": [
            {"round": 1, "server": "Triton", "model": "tiny", "reason": "it\nended: /a/b/c.py said no"}
        ],
    }


def test_a_table_has_medians_and_the_fastest_first() -> None:
    lines = tables.unary(rows(), "tiny").splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == [LANE, ECHO]
    assert [cell.strip() for cell in lines[2].split("|")[2:7]] == [
        "400",
        "– / –",
        "1.00 / 2.00",
        "50",
        "16.0",
    ]


def test_a_missing_figure_is_a_dash() -> None:
    assert tables.number(None) == "–"
    assert tables.middle(rows(), LANE, "tiny", UNARY, 64, "rate") is None


def test_the_page_names_the_machine_failures_and_missing_servers() -> None:
    page = generated(results())
    assert "3 rounds in 30 minutes, on a processor, 2 cores" in page
    assert "| unary calls/s, tiny, 32 in flight ÷ bare threaded echo | ≥ 4.2 | 4.00 (3.00–5.00)" in page
    assert "1,000,000 in batches of 32" in page
    assert "Not installed, so not measured: Ray Serve." in page
    assert "Round 2, Triton failed: it ended: c.py said no" in page
    assert "mosec" not in page.splitlines()[0]  # Installed, but not measured.


def test_every_round_measures_known_servers_and_ours_first_or_last() -> None:
    for number in (0, 1):
        names = [visit.server for visit in full_round(number)]
        assert set(names) - {RAW} == set(servers())
    first, second = full_round(0), full_round(1)
    assert [visit.server for visit in first if visit.model == "tiny"] == [
        visit.server for visit in reversed([visit for visit in second if visit.model == "tiny"])
    ]
    assert not {visit.server for visit in second if visit.model == "mlp"} & set(SLOW_PEERS)


@pytest.mark.parametrize("visits", [full_round(0), full_round(1), quick_round(0)])
def test_raw_onnx_runtime_follows_the_lane_whose_batches_it_must_know(visits: list[Any]) -> None:
    for before, visit in pairwise(visits):
        if visit.server == RAW:
            assert (before.server, before.model) == (LANE, visit.model)


def test_an_open_loop_comes_after_the_closed_loops_that_tell_the_capacity() -> None:
    for visit in (*full_round(0), *full_round(1), *quick_round(0)):
        patterns = [cell.pattern for cell in visit.cells]
        if OPEN in patterns:
            assert UNARY in patterns[: patterns.index(OPEN)]


def test_five_rounds_fit_into_forty_minutes() -> None:
    seconds = sum(cell.seconds + cell.warm_up for visit in full_round(1) for cell in visit.cells)
    assert seconds < 400
    assert sum(cell.seconds + cell.warm_up for visit in quick_round(0) for cell in visit.cells) < 60
