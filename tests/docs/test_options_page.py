"""docs/reference/options.md is what `make docs` writes."""

from __future__ import annotations

from docs.pages import ROOT

from tensorferry.server.config.reference import options_page

PAGE = ROOT / "docs" / "reference" / "options.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == options_page(), "run `make docs`"
