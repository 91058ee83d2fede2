"""The documentation site that `make docs` builds, in a browser: opened as files, and from a web server.

Nothing is fetched from elsewhere, and the search finds pages and names.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import pytest
from browser.chromium import Chromium, needs_chromium

from tensorferry import batcher, client, serving

ROOT = Path(__file__).resolve().parents[2]

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def site() -> Path:
    """The folder of the site that `make docs` has built."""
    folder = ROOT / "build" / "site"
    if not (folder / "index.html").exists():
        assert not os.environ.get("CI"), "CI needs the site: make docs"
        pytest.skip("there is no site: make docs builds it")
    return folder


def pages_of(site: Path) -> list[Path]:
    """Return all pages but the one that only sends the browser to another."""
    return sorted(page for page in site.rglob("*.html") if 'http-equiv="refresh"' not in page.read_text())


class QuietHandler(SimpleHTTPRequestHandler):
    """A handler that logs nothing."""

    def log_message(self, format: str, *arguments: object) -> None: ...


@pytest.fixture(params=["file", "http"])
def address(request: pytest.FixtureRequest, site: Path) -> Iterator[str]:
    """The address of the site's folder."""
    if request.param == "file":
        yield site.as_uri()
        return
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def found(page: Chromium, words: str, wanted: str) -> str:
    """Search as a reader does, wait for the result with this end, and return its address."""
    page.evaluate(
        f"(() => {{ const field = document.querySelector('.sidebar-search'); field.value = {words!r};"
        " field.form.submit(); })()"
    )
    page.until("location.pathname.endsWith('/search.html')")
    links = "[...document.querySelectorAll('#search-results li a')].map((link) => link.href.split('?')[0])"
    address: str = page.until(f"{links}.find((link) => link.endsWith({wanted!r}))")
    return address


def test_a_reader_finds_pages_and_names(address: str, page: Chromium) -> None:
    page.open(f"{address}/index.html")
    page.until("location.pathname.endsWith('/README.html') && document.readyState == 'complete'")
    assert page.evaluate("document.querySelector('h1').firstChild.textContent") == "tensorferry"
    captions = page.evaluate(
        "[...document.querySelectorAll('.sidebar-tree .caption-text')].map((caption) => caption.textContent)"
    )
    assert captions == ["Guides", "Reference", "Design", "Results", "Project"]
    page.open(found(page, "liveness readiness", "/docs/guides/operations.html"))
    assert page.evaluate("document.querySelector('h1').firstChild.textContent") == "Run in production"
    name = "tensorferry.client.InferenceClient.submit"
    page.open(found(page, "InferenceClient.submit", f"/docs/api/client.html#{name}"))
    assert page.evaluate("document.getElementById(location.hash.slice(1)) !== null")
    assert len(page.requested) > 10
    assert not [url for url in page.requested if not url.startswith((address, "data:"))]


def test_pages_fit_a_narrow_screen(site: Path, page: Chromium) -> None:
    page.window(390, 844)
    for file in pages_of(site):
        page.open(file.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, file


class Resources(HTMLParser):
    """The addresses of what a page loads."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag == "link" and given.get("rel") in (
            "stylesheet",
            "preload",
            "icon",
            "shortcut icon",
            "preconnect",
        ):
            self.loaded.append(given["href"])
        if "src" in given:
            self.loaded.append(given["src"])


def test_pages_load_only_files_of_the_site(site: Path) -> None:
    for page in pages_of(site):
        parser = Resources()
        parser.feed(page.read_text())
        assert parser.loaded, page
        for url in parser.loaded:
            if not url.startswith("data:"):
                assert "//" not in url, (page, url)
                assert (page.parent / url.partition("?")[0].partition("#")[0]).is_file(), (page, url)


def test_every_page_of_the_repository_is_in_the_site(site: Path) -> None:
    sources = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.rst")]
    names = {source.relative_to(ROOT).with_suffix(".html") for source in sources}
    assert names <= {page.relative_to(site) for page in pages_of(site)}


@pytest.mark.parametrize("package", [client, batcher, serving], ids=lambda package: package.__name__)
def test_every_public_name_is_in_the_reference(package: ModuleType, site: Path) -> None:
    page = site / "docs" / "api" / f"{package.__name__.rpartition('.')[2]}.html"
    ids = set(re.findall(r'id="([^"]+)"', page.read_text()))
    assert {f"{package.__name__}.{name}" for name in package.__all__} <= ids
