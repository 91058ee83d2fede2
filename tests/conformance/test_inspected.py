"""What `inspect` advises cures the model: the cured one is batched."""

from __future__ import annotations

from pathlib import Path

import pytest
from conformance.cured import Cured, cured_models, saved
from conformance.exported import Exported, exported
from conformance.inspected import before_and_after, generated_part, said_of
from support.models import extensions

from tensorferry.server.onnx.graph import RowMixing

WORDS = {
    RowMixing.SEPARATE: {"proved"},
    RowMixing.UNKNOWN: {"tested", "refused"},
    RowMixing.MIXES: {"refused"},
}


@pytest.mark.parametrize("one", cured_models(), ids=lambda one: one.name)
def test_a_cure_changes_the_verdict(one: Cured, tmp_path: Path) -> None:
    if one.options:
        extensions.skip_without()
    said, after = before_and_after(one, tmp_path)
    assert said.verdict == one.before
    assert one.word in said.cures[0]
    assert after == one.after


@pytest.mark.parametrize("one", exported(), ids=lambda one: one.name)
def test_every_exported_model_that_is_not_batched_has_a_cure(one: Exported, tmp_path: Path) -> None:
    said = said_of(saved(one.model, one.name, tmp_path))
    if one.name != "sklearn_text":  # It needs a locale that the machine may lack.
        assert said.verdict in WORDS[one.finding]
        assert bool(said.cures) is (said.verdict == "refused")
        assert bool(said.reason) is (said.verdict != "proved")


def test_the_page_has_a_row_for_every_model_with_a_cure() -> None:
    part = generated_part(Path(__file__).parents[2] / "docs" / "results" / "batching_evidence.md")
    rows = [f"| `{one.name}` | {one.before} | " for one in cured_models()]
    assert [row for row in rows if row not in part] == []
    assert part.count("\n| `") > len(rows)
    assert "/tmp/" not in part
