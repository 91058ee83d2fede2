"""The graph analysis compared with runs, for a few random graphs; `make batching-evidence` draws
thousands.
"""

from __future__ import annotations

from pathlib import Path

from conformance.drawn.compositions import compare_all
from conformance.drawn.one_row import CHANGED, compare_copies

from tensorferry.server.onnx.graph import RowMixing


def test_no_graph_that_mixes_rows_is_proved() -> None:
    compared = [one for one in compare_all(1, 30) if one.mixing is not None]
    proved = [one for one in compared if one.analysis.finding is RowMixing.SEPARATE]
    assert {one.name: one.mixing for one in proved if one.mixing} == {}
    apart = [one for one in compared if not one.mixing]
    assert len(proved) >= 0.9 * len(apart) > 0
    assert any(one.mixing for one in compared), "some of them mix rows"


def test_copies_of_graphs_of_one_row_give_the_answers_of_the_files(tmp_path: Path) -> None:
    kinds, wrong = compare_copies(1, 80, tmp_path)
    assert wrong == []
    assert kinds[CHANGED] > 1
