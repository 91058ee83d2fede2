"""The search of the site that `make docs` builds: the page that a reader wants comes first.

Node runs Sphinx's script with the site's index, as a browser does.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess

import pytest
from docs.pages import ROOT

SITE = ROOT / "build" / "site"

# The words of a reader, and the page that has the answer.
WANTED = {
    "install": "docs/guides/install",
    "docker": "docs/guides/operations",
    "batch size": "docs/guides/serving",
    "token": "docs/guides/security",
    "multiple models": "docs/guides/serving",
    "memory": "docs/guides/operations",
    "config file": "docs/guides/serving",
    "queue full": "docs/guides/troubleshooting",
    "slow start": "docs/guides/serving",
    "upgrade": "docs/guides/install",
}
# The scripts of search.html, in its order.
SCRIPTS = ("_static/searchtools.js", "_static/language_data.js", "searchindex.js")
# What the scripts need of a browser, and the pages of each search, the first one first.
_SEARCH = """
const fs = require("fs"), vm = require("vm");
const [scripts, searches] = process.argv.slice(1).map((text) => JSON.parse(text));
const page = { document: { getElementById: () => null }, SPHINX_HIGHLIGHT_ENABLED: false, _: (text) => text, _ready: () => {} };
page.window = page;
vm.createContext(page);
for (const script of scripts) vm.runInContext(fs.readFileSync(script, "utf8"), page);
page.found = (words) => vm.runInContext("Search._performSearch(...Search._parseQuery(words))", Object.assign(page, { words }));
const pages = (words) => page.found(words).map((result) => result[0]).reverse();
console.log(JSON.stringify(Object.fromEntries(searches.map((words) => [words, pages(words)]))));
"""


def test_the_wanted_page_comes_first() -> None:
    for missing, how in (
        (not (SITE / "index.html").exists(), "the site: make docs builds it"),
        (shutil.which("node") is None, "Node"),
    ):
        if missing:
            assert not os.environ.get("CI"), f"CI needs {how}"
            pytest.skip(f"needs {how}")
    scripts = [str(SITE / script) for script in SCRIPTS]
    command = ["node", "-e", _SEARCH, json.dumps(scripts), json.dumps(list(WANTED))]
    searched = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    found = json.loads(searched.stdout)
    assert {words: pages[:1] for words, pages in found.items()} == {
        words: [page] for words, page in WANTED.items()
    }
    for words, pages in found.items():
        last = [page.startswith(("docs/api/", "docs/results/", "CHANGELOG")) for page in pages]
        assert last == sorted(last), f"{words}: guides come before names, measurements and the changelog"
