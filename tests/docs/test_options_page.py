"""docs/reference/options.md is what `make docs` writes."""

from __future__ import annotations

from docs.pages import ROOT

from tensorferry.server.config.reference import options_page
from tensorferry.server.config.server_config import OPTIONS

PAGE = ROOT / "docs" / "reference" / "options.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == options_page(), "run `make docs`"


def test_the_page_has_one_row_for_each_option() -> None:
    page = PAGE.read_text()
    assert page.count("\n| `--") == len(OPTIONS)
    for option in OPTIONS:
        assert page.count(f"\n| `--{option.flag}` |") == 1
        assert page.count(f"| `{option.variable}` |") == 1


def test_ci_checks_the_page() -> None:
    assert "make docs-check\n" in (ROOT / ".ci" / "run").read_text()
