"""`make simulate` replaces the marked tables of docs/results/simulation.md."""

from __future__ import annotations

from pathlib import Path

from run import replace_table

PAGE = "text\n<!-- `make simulate` writes Goodput -->\n\nold\n\n<!-- end of Goodput -->\nmore\n"


def test_a_marked_table_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    replace_table(page, "Goodput", "new")
    assert page.read_text() == PAGE.replace("old", "new")


def test_a_table_without_marks_is_ignored(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    replace_table(page, "Overload", "new")
    assert page.read_text() == PAGE
