"""The commands and the Python of README.md, the other pages of the root, and docs/, as a reader copies them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from docs.not_run import OTHERS

ROOT = Path(__file__).resolve().parents[2]

# The first words of commands; other indented blocks are output, trees or configuration.
PROGRAMS = {
    "cat", "curl", "docker", "go", "grpcurl", "helm", "java", "kubectl", "kustomize", "make", "mkdir", "npm", "openssl",
    "perf_analyzer", "pip", "promtool", "python", "tensorferry",
}  # fmt: skip
_ASSIGNMENT = re.compile(r"[A-Z_]+=(?:\$\([^)]*\)|\S*)\s+(?=\S)|P=\S+$")


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a page; `language` is "" for an indented block and for a fence without a language."""

    page: str
    line: int
    language: str
    fenced: bool
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True, slots=True)
class Command:
    """A shell command, with its continuation lines."""

    page: str
    line: int
    text: str

    @property
    def words(self) -> list[str]:
        """The program and its arguments, without variables and comment."""
        return shlex.split(without_variables(self.text), comments=True)

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    def __str__(self) -> str:
        return f"{self.place}: {self.text.splitlines()[0]}"


def without_variables(text: str) -> str:
    """Return a command without the variables before it."""
    while found := _ASSIGNMENT.match(text):
        text = text[found.end() :]
    return text


def pages(root: Path = ROOT) -> list[Path]:
    return [*sorted(root.glob("*.md")), *sorted((root / "docs").rglob("*.md"))]


def blocks(root: Path = ROOT) -> Iterator[Block]:
    """Yield all fenced and indented blocks of a checkout's pages."""
    for page in pages(root):
        lines = page.read_text().splitlines()
        name = str(page.relative_to(root))
        at = 0
        while at < len(lines):
            begin = at
            fence = re.match(r"(\s*)```(\w*)$", lines[at])
            if fence:
                at += 1
                while lines[at].strip() != "```":
                    at += 1
                yield Block(name, begin + 2, fence[2], True, "\n".join(lines[begin + 1 : at]))
            elif re.match(r" {4,}\S", lines[at]) and (at == 0 or not lines[at - 1].strip()):
                while at + 1 < len(lines) and re.match(r" {4,}\S", lines[at + 1]):
                    at += 1
                indent = len(lines[begin]) - len(lines[begin].lstrip())
                text = "\n".join(line[indent:] for line in lines[begin : at + 1])
                yield Block(name, begin + 1, "", False, text)
            at += 1


def is_shell(block: Block) -> bool:
    if block.language == "sh":
        return True
    if block.text.startswith(OTHERS.get(block.page, ())):
        return False
    first = without_variables(block.text.splitlines()[0]).split()
    return not block.fenced and bool(first) and first[0] in PROGRAMS


def commands(block: Block) -> Iterator[Command]:
    """Yield the commands of a shell block."""
    text, begin = "", block.line
    for number, line in enumerate(block.text.splitlines(), block.line):
        if not text:
            begin = number
        text = f"{text}\n{line}" if text else line
        if _complete(text):
            yield Command(block.page, begin, text)
            text = ""
    assert not text, f"{block.place}: an incomplete command: {text}"


def _complete(text: str) -> bool:
    if text.rstrip().endswith(("\\", "|")) or (text.startswith("for ") and not text.endswith("done")):
        return False
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return False
    return True


def commands_in_text(page: str, root: Path = ROOT) -> Iterator[Command]:
    """Yield the commands that stand between backquotes in the sentences of a page."""
    outside = True
    for number, line in enumerate((root / page).read_text().splitlines(), 1):
        if line.strip().startswith("```"):
            outside = not outside
        for text in re.findall(r"`([^`]+)`", line) if outside else ():
            if text.split()[0] in PROGRAMS and " " in text.strip():
                yield Command(page, number, text)


def expected_output(code: str) -> list[str] | None:
    """Return the output that the comments of `print` lines state; None if a print has no comment or is indented."""
    expected = []
    for line in code.splitlines():
        if line.strip().startswith("print("):
            found = re.search(r"\)  # (.*)$", line)
            if found is None:
                return None
            expected.append(found[1])
    return expected
