"""Configuration of the documentation site, which `make docs` builds with Sphinx.

The sources are the pages as they are read in the repository: README.md, the other pages of the root, and docs/.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

import tensorferry.batcher
import tensorferry.client
import tensorferry.serving

ROOT = Path(__file__).resolve().parents[2]
_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

project = "tensorferry"
release = _PROJECT["version"]
root_doc = "README"
# Sphinx would search every other folder of the repository, environments included. The list does not depend on which of
# them exist: after a change of it Sphinx builds all pages again.
exclude_patterns = [
    ".*",
    "batcher",
    "benchmarks",
    "build",
    "client",
    "deploy",
    "dist",
    "examples",
    "protos",
    "requirements",
    "server",
    "tests",
]

extensions = ["myst_parser", "sphinx.ext.autodoc"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
# Anchors of all headings, named as in the repository's pages. A link to a missing one is a warning.
myst_heading_anchors = 6
# Indented blocks are mostly commands and their output.
highlight_language = "none"

html_theme = "furo"
html_title = f"tensorferry {release}"
html_copy_source = False
# Excerpts would need requests, which browsers refuse to a page that was opened as a file.
html_show_search_summary = False
html_search_scorer = str(Path(__file__).with_name("scorer.js"))
# The theme has no web fonts, and nothing else that is fetched from elsewhere.
html_theme_options = {"top_of_page_buttons": []}

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
maximum_signature_line_length = 80
# Names in backquotes are links, where they name something that is documented.
default_role = "py:obj"

# Sections of the navigation: caption, and folder of the pages.
SECTIONS = {"Guides": "guides", "Reference": "reference", "Design": "design", "Results": "results"}
# Pages of a section that are not Markdown, and pages without a folder.
API = ["docs/api/client", "docs/api/batcher", "docs/api/serving"]
OTHERS = ["CONTRIBUTING", "SECURITY", "CHANGELOG"]

# The names that the packages export. Each is read once, because some are imported when they are first used, and autodoc
# documents only those that it finds in the module.
PUBLIC = {
    name
    for package in (tensorferry.client, tensorferry.batcher, tensorferry.serving)
    for name in package.__all__
    if getattr(package, name) is not None
}

_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([\w./-]+)(#[\w-]+)?\)")
_FENCE = re.compile(r"^```(\w*)$")


def navigation(readme: str) -> str:
    """Return the site's table of contents: the pages that README.md links, by folder, in the order of its
    section of the documentation.
    """
    before, _, documentation = readme.partition("\n## Documentation\n")
    text = "\n"
    for caption, folder in SECTIONS.items():
        pages = dict.fromkeys(re.findall(rf"\((docs/{folder}/\w+)\.md[)#]", documentation + before))
        listed = [*pages, *(API if folder == "reference" else ())]
        text += toctree(caption, listed)
    return text + toctree("Project", OTHERS)


def toctree(caption: str, pages: list[str]) -> str:
    """Return a directive with these pages, which only the navigation shows."""
    return "\n".join(["\n```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```\n"])


def without_links_to_sources(text: str, folder: Path, pages: set[Path]) -> str:
    """Replace links to files that are no pages of the site, such as tests, by their text."""

    def replaced(link: re.Match[str]) -> str:
        target = (folder / link[2]).resolve()
        is_outside = target.exists() and target not in pages
        return link[1] if is_outside else link[0]

    return _LINK.sub(replaced, text)


def read_page(app: Sphinx, name: str, content: list[str]) -> None:
    """Adapt a page of the repository to the site."""
    file = Path(app.env.doc2path(name))
    if file.suffix != ".md":
        return
    pages = {Path(app.env.doc2path(page)).resolve() for page in app.env.found_docs}
    content[0] = without_links_to_sources(content[0], file.parent, pages)
    if name == root_doc:
        content[0] += navigation(content[0])


def read_docstring(
    app: Sphinx, kind: str, name: str, described: object, options: object, lines: list[str]
) -> None:
    """Convert what docstrings have of Markdown: fenced and indented blocks of code, and lists without an
    empty line before them.
    """
    lines[:] = converted(lines)


def converted(lines: list[str]) -> list[str]:
    """Return the lines of a docstring as reStructuredText."""
    made: list[str] = []
    in_fence = False
    # The last line of text, at the left margin or not.
    text = ""
    for line in lines:
        is_item = line.startswith("- ")
        fence = _FENCE.match(line)
        if fence:
            made += [""] if in_fence else ["", f".. code-block:: {fence[1] or 'default'}", ""]
            in_fence = not in_fence
        elif in_fence:
            made.append(f"    {line}")
        else:
            follows_paragraph = bool(text) and text[0] not in " -."
            if is_item and follows_paragraph and made[-1]:
                made.append("")
            elif line.startswith("    ") and follows_paragraph and not made[-1]:
                made += [".. code-block:: default", ""]
            made.append(line)
        text = line or text
    return made


def keep_public_names(
    app: Sphinx, kind: str, name: str, described: object, skip: bool, options: Any
) -> bool | None:
    """Keep the public functions and classes of a module that have no docstring."""
    is_listed = kind == "module" and name in PUBLIC and name not in (options.exclude_members or ())
    return False if is_listed else None


def write_start_page(app: Sphinx, error: Exception | None) -> None:
    """Write index.html, which web servers show for a folder: it opens the page of README.md."""
    if error is None and app.builder.format == "html":
        start = f'<!doctype html><meta http-equiv="refresh" content="0; url={root_doc}.html"><title>{html_title}</title>'
        (Path(app.outdir) / "index.html").write_text(start + "\n")


def setup(app: Sphinx) -> None:
    """Register the functions of this file with Sphinx."""
    app.connect("source-read", read_page)
    app.connect("autodoc-skip-member", keep_public_names)
    app.connect("autodoc-process-docstring", read_docstring)
    app.connect("build-finished", write_start_page)
