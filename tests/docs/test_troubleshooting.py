"""Each heading of docs/guides/troubleshooting.md is a message of the product: the page names none that has changed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from docs.pages import ROOT

PAGE = ROOT / "docs" / "guides" / "troubleshooting.md"
SOURCES = ("batcher", "server", "client")
# The messages in the table below this heading are those of other programs.
OF_OTHERS = "Texts of gRPC and curl"
# A field of an f-string, or a conversion such as %s or %.2f: it stands for any text.
HOLE = "\0"
_CONVERSION = re.compile(r"%[-+ #0]*\d*(?:\.\d+)?[sdrgf]")
# A heading needs a fragment of this many characters, because "...: ..." is in many messages.
_LEAST = 9


def headings() -> list[str]:
    return re.findall(r"^### (.+)$", PAGE.read_text(), re.MULTILINE)


def texts(tree: ast.AST) -> Iterator[str]:
    """Yield the texts of a module without its docstrings; adjacent literals are one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            # A docstring, which would be walked after this statement.
            node.value.value = None
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else HOLE for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield _CONVERSION.sub(HOLE, node.value)


def test_each_heading_is_a_message_of_the_product() -> None:
    files = [file for folder in SOURCES for file in (ROOT / folder).rglob("*.py")]
    found = (text.replace("\n", " ") for file in files for text in texts(ast.parse(file.read_text())))
    messages = "\n".join(found)
    for heading in headings():
        if heading == OF_OTHERS:
            continue
        quoted = re.fullmatch("`([^`]+)`", heading)
        assert quoted, f"{heading}: a message is in backquotes"
        fragments = quoted[1].split("...")
        assert max(map(len, fragments)) >= _LEAST, f"{heading}: it fits too many messages"
        is_message = re.search(".*".join(map(re.escape, fragments)), messages) is not None
        assert is_message, f"{heading}: no message of the product"


def test_no_heading_is_there_twice() -> None:
    assert len(set(headings())) == len(headings())
