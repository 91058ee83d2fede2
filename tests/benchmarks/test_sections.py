"""Generated sections in hand-written pages."""

from __future__ import annotations

import pytest
from sections import Section

from gpu import report as gpu_report
from serving.reporting import report as serving_report

SECTIONS = [serving_report.SECTION, gpu_report.SECTION]


@pytest.mark.parametrize("section", SECTIONS)
def test_only_the_part_between_the_marks_is_replaced(section: Section) -> None:
    (other,) = (each for each in SECTIONS if each != section)
    rest = f"{other.begin}\nkept\n{other.end}\n\nby hand\n"
    page = f"# Title\n\nby hand\n\n{section.begin}\nold\n{section.end}\n\n{rest}"
    assert section.of(page) == "old"
    once = section.replaced(page, "new")
    assert once == f"# Title\n\nby hand\n\n{section.begin}\n\nnew\n\n{section.end}\n\n{rest}"
    assert section.replaced(once, "new") == once
    with pytest.raises(ValueError, match="the page has no"):
        section.replaced(rest, "new")


def test_a_page_that_is_not_there_yet_has_a_place() -> None:
    assert "new" in serving_report.SECTION.replaced(serving_report.EMPTY_PAGE, "new")
