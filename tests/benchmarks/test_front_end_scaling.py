"""Tests of the predictions for more cores."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import front_end_scaling
import pytest
from front_end_scaling import IMAGE, SECTION, SMALL, Costs, costs_of, measured, predicted, section_of
from front_ends import FRONT_ENDS, Result, Results, page

from tensorferry.server.cores import Division

PAGE = Path(front_end_scaling.__file__).parents[1] / "docs" / "results" / "front_ends.md"
COSTS = Costs(one_process=50.0, engine=10.0, front_end=40.0)


class _Bench:
    cache = Path("/nowhere")


def made_page(other_cores: float = 0.1) -> str:
    """The page of measurements in which each further front-end makes a call cost one microsecond more."""
    results = Results()
    for load in (SMALL, IMAGE):
        for count in FRONT_ENDS:
            cpu = {"first process": 0.0, "engine": 10.0 + count, "front-ends": 30.0 + count}
            result = Result(1000.0 * (1 + count), 1.0, cpu if count else {"first process": 50.0}, other_cores)
            results.loads[load, count].append(result)
    results.engine.append((40.0, 10.0))
    return page(results, cast(Any, _Bench()), "make it")


def test_the_costs_are_medians_over_the_numbers_of_front_ends() -> None:
    assert costs_of(made_page(), SMALL) == Costs(50.0, 12.5, 32.5)
    rows = measured(made_page(), IMAGE)
    assert [row.front_ends for row in rows] == list(FRONT_ENDS)
    assert rows[2].rate == 3000.0
    assert rows[2].cores == pytest.approx(3000 * 44e-6)


def test_costs_are_known_although_rates_are_too_noisy() -> None:
    noisy = made_page(other_cores=2.0)
    assert costs_of(noisy, SMALL) == Costs(50.0, 12.5, 32.5)
    assert "engine and front-ends used" not in section_of(noisy)


@pytest.mark.parametrize("broken", ["", "tiny, 256 in flight:\n\n| a | b |\n|---|---|\n| 1 | 2 |\n"])
def test_another_page_is_an_error(broken: str) -> None:
    with pytest.raises(ValueError, match="the page has"):
        costs_of(f"\n{broken}", SMALL)


@pytest.mark.parametrize(
    ("division", "model_ms", "text"),
    [
        (Division(4, 2, True), 0.0, "50,000 (front-ends)"),
        (Division(16, 4, True), 0.0, "100,000 (front-ends)"),
        (Division(16, 5, True), 0.0, "100,000 (engine)"),
        (Division(2, 0, True), 0.0, "20,000 (one process)"),
        # 13 threads.
        (Division(16, 2, False), 1.0, "13,000 (ONNX Runtime)"),
        (Division(4, 0, False), 0.95, "4,000 (cores)"),
    ],
)
def test_the_least_limit_is_the_prediction(division: Division, model_ms: float, text: str) -> None:
    assert str(predicted(COSTS, division, model_ms)) == text


def test_the_section_has_every_number_of_cores() -> None:
    text = section_of(made_page())
    for cores in (4, 8, 16, 64):
        assert text.count(f"\n| {cores} | ") == 2
    assert "used 0.1 to 0.2 cores" in text
    assert "Alone on a core it took 10.0 us, with which its limit is 100,000 calls/s." in text


def test_the_section_and_the_plot_of_the_page_are_made_of_its_tables() -> None:
    page = PAGE.read_text()
    assert SECTION.of(page) == section_of(page), "run `make bench-front-ends-report`"
    assert (PAGE.parent / "plots" / "front_ends.svg").exists()


def test_the_section_is_replaced(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file, plot = tmp_path / "page.md", tmp_path / "plots" / "plot.svg"
    file.write_text(made_page() + f"\n{SECTION.begin}\nold\n{SECTION.end}\n")
    front_end_scaling.main([str(file), str(plot)])
    assert SECTION.of(file.read_text()) == section_of(made_page())
    assert "small, GPU" in plot.read_text()
