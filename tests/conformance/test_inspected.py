"""What `inspect` advises cures the model: the cured one is batched."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from conformance.cured import cured_models, saved
from conformance.exported import exported
from conformance.inspected import before_and_after, generated_part, said_of

from tensorferry.server.onnx.graph import RowMixing

# The package of the operators of one model.
EXTENSIONS = "onnxruntime_extensions"
WORDS = {
    RowMixing.UNKNOWN: {"tested", "refused"},
    RowMixing.MIXES: {"refused"},
}


def test_a_cure_changes_the_verdict(tmp_path: Path) -> None:
    found = {}
    models = {one.name: one for one in cured_models() if not one.options or find_spec(EXTENSIONS)}
    for name, one in models.items():
        folder = tmp_path / name
        folder.mkdir()
        said, after = before_and_after(one, folder)
        assert one.word in said.cures[0], name
        found[name] = (said.verdict, after)
    assert found == {name: (one.before, one.after) for name, one in models.items()}


def test_every_exported_model_that_is_not_proved_has_a_reason_and_a_cure_if_it_is_refused(
    tmp_path: Path,
) -> None:
    for one in exported():
        # One needs a locale that the machine may lack.
        if one.finding is not RowMixing.SEPARATE and one.name != "sklearn_text":
            said = said_of(saved(one.model, one.name, tmp_path))
            assert said.verdict in WORDS[one.finding], one.name
            assert bool(said.cures) is (said.verdict == "refused"), one.name
            assert said.reason, one.name


def test_the_page_has_a_row_for_every_model_with_a_cure() -> None:
    part = generated_part(Path(__file__).parents[2] / "docs" / "results" / "batching_evidence.md")
    rows = [f"| `{one.name}` | {one.before} | " for one in cured_models()]
    assert [row for row in rows if row not in part] == []
    assert part.count("\n| `") > len(rows)
    assert "/tmp/" not in part
