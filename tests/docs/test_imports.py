"""Each package that a page's Python imports is in the install of README, or in a pip command of that page."""

from __future__ import annotations

import ast
import re
import sys

import pytest
from docs.pages import ROOT, blocks

# Of `pip install '.[cpu]'`; frigate runs its plugins.
INSTALLED = {"frigate", "google", "grpc", "numpy", "onnx", "onnxruntime", "tensorferry"}
# Where the module has another name than the package, or the extra.
PACKAGES = {"opentelemetry": "otel", "PIL": "pillow", "sklearn": "scikit-learn"}
PAGES = sorted({block.page for block in blocks() if block.language == "python"})


def imported(page: str) -> set[str]:
    """Return the top-level names of the modules that a page's blocks import."""
    found = set()
    for block in blocks():
        if block.page == page and block.language == "python":
            for node in ast.walk(ast.parse(block.text)):
                if isinstance(node, ast.Import):
                    found |= {name.name.partition(".")[0] for name in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module:
                    found.add(node.module.partition(".")[0])
    return found


def installed(text: str) -> set[str]:
    """Return the names of packages and extras in the text's pip commands."""
    return {
        name for words in re.findall(r"pip install ([^`\n]+)", text) for name in re.findall(r"[\w-]+", words)
    }


@pytest.mark.parametrize("page", PAGES)
def test_the_page_says_how_to_install_what_it_imports(page: str) -> None:
    others = imported(page) - INSTALLED - sys.stdlib_module_names
    needed = {PACKAGES.get(name, name) for name in others}
    assert needed <= installed((ROOT / page).read_text())
