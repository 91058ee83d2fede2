"""Tests of the section of docs/results/processes.md."""

from __future__ import annotations

from pathlib import Path

import processes
from processes import SECTION, page

from serving.measure import Row
from serving.workloads import MLP

_MACHINE = {
    "processor": "it",
    "cores": 2,
    "python": "3.11",
    "versions": {"grpcio": "1.85", "onnxruntime": "1.32"},
}


def _row(rate: float, p50_ms: float, cpu_us: float) -> Row:
    return {"rate": rate, "p50_ms": p50_ms, "cpu_us_per_answer": cpu_us, "other_cores": 0.1}


def test_ratios_are_within_a_round() -> None:
    rounds = [
        {1: _row(1000.0, 1.0, 40.0), 2: _row(1200.0, 0.9, 44.0)},
        {1: _row(500.0, 2.0, 80.0), 2: _row(800.0, 2.1, 80.0)},
        {1: _row(1000.0, 1.0, 40.0), 2: _row(1300.0, 0.8, 36.0)},
    ]
    row = "| mlp, 32 in flight | 3 | 1,000 | 1.30 (1.20 - 1.60) | 1.00 | -0.10 | 40.0 | 1.00 (0.90 - 1.10) |"
    assert page({(MLP, 32): rounds}, _MACHINE, "make it").splitlines()[-1] == row


def test_the_page_has_the_section() -> None:
    path = Path(processes.__file__).parents[1] / "docs" / "results" / "processes.md"
    assert SECTION.of(path.read_text())
