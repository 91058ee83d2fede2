"""The stages and instructions of a Dockerfile."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Stage:
    """A build stage: its name, the stage or image that it begins with, and its other instructions."""

    name: str
    base: str
    instructions: tuple[tuple[str, str], ...]

    def of(self, instruction: str) -> list[str]:
        """Return the arguments of each instruction of a kind."""
        return [arguments for kind, arguments in self.instructions if kind == instruction]


def arguments_of(dockerfile: Path) -> dict[str, str]:
    """Return the names and default values of the arguments of the whole file."""
    before, _, _ = dockerfile.read_text().partition("\nFROM ")
    return dict(arguments.split("=", 1) for kind, arguments in instructions(before) if kind == "ARG")


def stages(dockerfile: Path) -> dict[str, Stage]:
    """Return the stages by name, in the order of the file. Each stage must have a name."""
    found: dict[str, Stage] = {}
    name, base, kept = "", "", list[tuple[str, str]]()
    for kind, arguments in [*instructions(dockerfile.read_text()), ("FROM", "")]:
        if kind != "FROM":
            kept.append((kind, arguments))
            continue
        if name:
            found[name] = Stage(name, base, tuple(kept))
        base, _, name = arguments.partition(" AS ")
        assert name or not arguments, f"the stage from {arguments} has no name"
        kept = []
    return found


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Yield each instruction and its arguments, with continuation lines joined."""
    without_comments = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE)
    for line in re.sub(r"\\\n\s*", "", without_comments).splitlines():
        if line.strip():
            kind, _, arguments = line.partition(" ")
            yield kind, arguments.strip()
