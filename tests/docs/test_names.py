"""Every page, heading, file and make target that a page refers to exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from docs.pages import ROOT, pages

# Files that only use creates.
CREATED = ("benchmarks/serving/results",)
FOLDERS = "batcher|benchmarks|client|deploy|docs|examples|protos|requirements|server|tests"


def slugs(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"`|\*", "", text)).lower().replace(" ", "-") for text in headings}


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_links(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([\w./-]*)(?:#([\w-]+))?\)", page.read_text()):
        linked = page.parent / target if target else page
        assert linked.exists(), target
        assert not anchor or anchor in slugs(linked), f"{target}#{anchor}"


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_files(page: Path) -> None:
    for name in re.findall(rf"`((?:{FOLDERS})/[\w./-]+)`", page.read_text()):
        assert (ROOT / name).exists() or name.startswith(CREATED), name


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_targets_of_make(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make (?:-k )?([a-z-]+)", page.read_text()):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_readme_is_short_and_links_every_page() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 1000
    linked = {ROOT / target for target in re.findall(r"\]\(([\w./-]+)", text)}
    assert set(pages()) - {ROOT / "README.md"} <= linked
