"""Every file and make target that a page refers to exists; `make docs` fails for a link that leads nowhere."""

from __future__ import annotations

import re

from docs.pages import ROOT, pages

# Files that only use creates.
CREATED = ("benchmarks/serving/results",)
FOLDERS = "batcher|benchmarks|client|deploy|docs|examples|protos|requirements|server|tests"


def test_files_and_targets_of_make() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for page in pages():
        text = page.read_text()
        for name in re.findall(rf"`((?:{FOLDERS})/[\w./-]+)`", text):
            assert (ROOT / name).exists() or name.startswith(CREATED), f"{page.name}: {name}"
        for target in re.findall(r"`make (?:-k )?([a-z-]+)", text):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page.name}: make {target}"


def test_readme_is_short_and_links_every_page() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 1000
    linked = {ROOT / target for target in re.findall(r"\]\(([\w./-]+)", text)}
    assert set(pages()) - {ROOT / "README.md"} <= linked
