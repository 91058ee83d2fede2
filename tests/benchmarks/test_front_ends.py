"""Tests of the section of docs/results/front_ends.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import front_ends
import pytest
from front_ends import FRONT_ENDS, SECTION, Result, Results, page


class _Bench:
    cache = Path("/nowhere")


def _page(results: Results) -> str:
    return page(results, cast(Any, _Bench()), "make it")


def _results(*other_cores: float) -> Results:
    results = Results()
    for cores in other_cores:
        for count in FRONT_ENDS:
            result = Result(1000.0 * (1 + count), 0.1 + count, {"engine": 10.0}, cores)
            results.loads["tiny, 1 in flight", count].append(result)
    results.memory[0] = {"first process": [70.0]}
    results.spread[2, 4] = [0.5, 0.75, 1.0]
    results.engine.append((40.0, 10.0))
    return results


def test_ratios_are_those_of_quiet_rounds() -> None:
    text = _page(_results(0.1, 0.9))
    assert "| 2 | 1 of 2 | 3.00 (3.00 - 3.00) | +2.000 | 3,000 |" in text


def test_noisy_rounds_alone_are_not_compared() -> None:
    assert "| 2 | 0 of 1 | too noisy | too noisy | too noisy | too noisy |" in _page(_results(0.9))


def test_the_other_tables() -> None:
    text = _page(_results(0.1))
    assert "| 0 | first process 70 | 70 |" in text
    assert "| 2 | 4 | 0.75 | 1.00 | 0.50 |" in text
    assert "Ratio 4.00 (4.00 - 4.00)" in text


def test_peers_are_compared_with_the_best_number_of_front_ends() -> None:
    results = _results(0.1)
    assert "Peers" not in _page(results)
    results.peers["tiny, 1 in flight", "mosec"][0] = Result(2000.0, 0.1, {"first process": 20.0}, 0.1)
    assert "| tiny, 1 in flight | mosec | 1 of 1 | 4 | 2.50 (2.50 - 2.50) | 2,000 | 20.0 |" in _page(results)


def test_the_page_has_the_section() -> None:
    path = Path(front_ends.__file__).parents[1] / "docs" / "results" / "front_ends.md"
    assert "front-ends" in SECTION.of(path.read_text())


def test_a_process_that_has_ended_is_no_front_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(path: Path) -> str:
        raise ProcessLookupError(path)

    monkeypatch.setattr(Path, "read_text", gone)
    assert front_ends.role_of(1) == "first process"
