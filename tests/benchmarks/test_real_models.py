"""Benchmark of real models: comparison of answers, ratios to the best size, requests, and the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from real_models.answers import same
from real_models.catalogue import MODELS, RealModel
from real_models.rates import DEFAULT, IN_FLIGHT, beside_best
from real_models.report import SECTION, generated

PAGE = Path(__file__).resolve().parents[2] / "docs" / "results" / "real_models.md"


def measured(number: int, size: int, rate: float, in_flight: int = 4) -> dict[str, Any]:
    return {
        "model": "detection",
        "round": number,
        "size": size,
        "in_flight": in_flight,
        "rate": rate,
        "p50_ms": 1000 * in_flight / rate,
        "p99_ms": 1.0,
        "cpu_us_per_answer": 1e6 / rate,
        "full_rows": 2,
        "other_cores": 0.0,
    }


def test_answers_are_the_same_up_to_rounding() -> None:
    right = {"y": np.array([[0.5, 2e-6]], np.float32)}
    assert same({"y": right["y"] + np.float32(1e-4)}, right)
    assert not same({"y": right["y"] + np.float32(1e-2)}, right)
    assert not same({"y": right["y"][0]}, right)
    assert not same({}, right)


def test_small_outputs_are_compared_by_their_own_magnitude() -> None:
    right = {"y": np.array([[1e-6, 2e-6]], np.float32)}
    assert not same({"y": right["y"][:, ::-1]}, right)


def test_the_best_size_of_a_round_is_chosen_by_the_other_rounds() -> None:
    """Else the best of several equal sizes would be a lucky one, and the default would seem slower than it is."""
    rows = [
        *(measured(number, DEFAULT, 100) for number in range(3)),
        *(measured(number, 1, rate) for number, rate in enumerate([100, 130, 100])),
        *(measured(number, 2, rate) for number, rate in enumerate([130, 100, 110])),
    ]
    assert beside_best(rows, "rate") == [100 / 100, 100 / 100, 100 / 100]
    assert beside_best(rows[:1] + rows[3:4] + rows[6:7], "rate") == [100 / 130]
    assert beside_best(rows[:1] + rows[3:4] + rows[6:7], "p50_ms") == pytest.approx([130 / 100])


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_requests_differ_and_can_be_repeated(model: RealModel) -> None:
    first, again, other = model.request(0), model.request(0), model.request(2)
    for name, array in first.items():
        np.testing.assert_array_equal(array, again[name])
    assert any(not np.array_equal(array, other[name]) for name, array in first.items())


def test_the_page_has_verdicts_ratios_and_failures() -> None:
    model = {
        "name": "detection",
        "package": "rapidocr-onnxruntime",
        "version": "1.4.4",
        "file": "det.onnx",
        "bytes": 4_700_000,
        "inputs": {"x": [None, 3, "height", "width"]},
        "verdict": "proved",
        "why": "batches of up to 32 rows (proved)",
        "max_batch_size": 32,
        "right": 299,
        "wrong": 1,
        "mean_rows": 2.0,
        "session_seconds": 0.05,
        "first_seconds": 2.0,
        "again_seconds": 1.5,
    }
    rows = [
        measured(0, size, rate, in_flight)
        for size, rate in ((DEFAULT, 90.0), (1, 100.0))
        for in_flight in IN_FLIGHT
    ]
    results: dict[str, Any] = {
        "date": "2026-11-25",
        "command": "make real-models",
        "rounds": 1,
        "minutes": 1,
        "machine": {
            "processor": "Xeon",
            "cores": 2,
            "memory_gib": 24,
            "system": "Linux",
            "python": "3.11",
            "versions": {"onnxruntime": "1.32.0"},
            "peers": {},
        },
        "models": [model],
        "measurements": rows,
        "open": [
            {"model": "detection", "best": 40.0, "rate": 36.0, "served": 0.9, "p50_ms": 80, "p99_ms": 200}
        ],
        "failures": [{"round": 0, "server": "layout", "model": "layout", "reason": "no answer"}],
    }
    page = generated(results)
    assert "1 of 300 answers are wrong." in page
    assert "| x [None, 3, height, width] | proved |" in page
    assert "| detection | 0.05 | 2.00 | 1.50 |" in page
    assert "| detection | 0.90 (0.90–0.90) * |" in page
    assert "| detection | 40.0 | 36.0 | 0.90 | 80 / 200 |" in page
    assert "Round 1, layout failed: no answer" in page
    without_rates = generated({**results, "measurements": [], "open": []})
    assert without_rates.count("\n## ") == 2


def test_the_page_has_its_generated_section() -> None:
    assert "new text" in SECTION.replaced(PAGE.read_text(), "new text")
