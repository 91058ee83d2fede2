"""`make first-hour`: what a new user types in a fresh clone, and how long it takes; the sizes of installs.

The commands are those of README.md, docs/guides/from_triton.md and docs/guides/kubernetes.md. The walk is
that of the last commit. It fails at the first command that does not work.

With --write there are two walks: one that downloads all packages, and one with pip's caches of the first.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import date
from functools import partial
from pathlib import Path

from first_hour.reader import Failed, without_this_environment
from first_hour.walk import Milestone, Walk, walk
from installs.environments import LIMITS
from sections import Section

from serving.machine import processor

SECTION = Section("<!-- first-hour: begin -->", "<!-- first-hour: end -->")


def main() -> int:
    """Return 0 if all commands work."""
    parser = argparse.ArgumentParser(
        prog="first_hour", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", type=Path, metavar="PAGE", help="page whose section is replaced")
    page: Path | None = parser.parse_args().write
    walks: dict[str, Walk] = {}
    with tempfile.TemporaryDirectory(prefix="first-hour-") as name:
        folder = Path(name)
        caches = folder / "caches" if page else None
        for pip in ("all downloaded", "pip's cache") if page else ("pip's cache as it is",):
            place = folder / str(len(walks))
            place.mkdir()
            try:
                walks[pip] = walk(place, caches, partial(tell, pip))
            except (Failed, AssertionError) as error:
                say(str(error))
                return 1
    *_, last = walks.values()
    text = f"{machine(date.today())}\n\n{milestones(walks)}\n\n{installs(last)}"
    print(text)
    if page:
        page.write_text(SECTION.replaced(page.read_text(), text))
    return 0


def tell(pip: str, what: str) -> None:
    """Say which part of which walk begins."""
    say(f"{what} ({pip})")


def say(text: str) -> None:
    """Write a line to stderr."""
    print(f"first-hour: {text}", file=sys.stderr, flush=True)


def machine(today: date) -> str:
    """Return the date, the machine, and the versions of a reader's programs."""
    versions = [
        subprocess.run(
            ["python3", *arguments],
            env=without_this_environment(),
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()[:2]
        for arguments in (["--version"], ["-m", "pip", "--version"])
    ]
    model = processor(Path("/proc/cpuinfo").read_text())
    programs = ", ".join(" ".join(words) for words in versions)
    return f"{today}, {os.cpu_count()} cores ({model}), {programs}."


def milestones(walks: dict[str, Walk]) -> str:
    """Return a table of the milestones, with the seconds of each walk."""
    rows: list[tuple[str, ...]] = []
    before: Milestone | None = None
    for same in zip(*(each.milestones for each in walks.values()), strict=True):
        one = same[0]
        lines = [f"`{line}`" for line in one.typed]
        if before is not None and one.typed[: len(before.typed)] == before.typed:
            lines[: len(before.typed)] = ["as above, then"]
        rows.append(
            (one.name, "<br>".join(lines), str(len(one.typed)), *(f"{each.seconds:.0f}" for each in same))
        )
        before = one
    return table(("from a clone to", "typed", "lines", *(f"s, {pip}" for pip in walks)), rows)


def installs(one: Walk) -> str:
    """Return a table of the installed sizes."""
    rows = [
        (
            f"`tensorferry{extra}`",
            f"{size.total() / 1e6:.0f}",
            f"{LIMITS[extra] / 1e6:.0f}",
            ", ".join(f"{name} {number / 1e6:.0f}" for name, number in size.most_common(4)),
        )
        for extra, size in one.sizes.items()
    ]
    return table(("install", "MB", "at most", "largest packages"), rows)


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = (titles, ["---"] * len(titles), *rows)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
