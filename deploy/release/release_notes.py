"""Print the release notes of a version: its section of CHANGELOG.md, for `make release-notes`.

    python deploy/release/release_notes.py [VERSION]

Without an argument, the version is that of pyproject.toml. `Unreleased` names the changes since then.
"""

from __future__ import annotations

import re
import signal
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_HEADING = re.compile(r"^## \[([^\]]+)\](?: - (\S+))?$", re.MULTILINE)


def release_notes(changelog: str, version: str) -> str:
    """Return the section of a version without its heading; raise ValueError if there is none, or
    nothing in it.
    """
    headings = list(_HEADING.finditer(changelog))
    for index, heading in enumerate(headings):
        if heading[1] == version:
            end = headings[index + 1].start() if index + 1 < len(headings) else len(changelog)
            notes = changelog[heading.end() : end].strip()
            if not notes:
                raise ValueError(f"CHANGELOG.md has an empty section for {version}: list its changes there")
            return notes
    known = ", ".join(heading[1] for heading in headings)
    raise ValueError(f"CHANGELOG.md has no section {version!r}, only {known}: add '## [{version}] - DATE'")


def main(arguments: list[str]) -> int:
    """Print the notes and return the exit code."""
    if len(arguments) > 1:
        print("usage: release_notes.py [VERSION]", file=sys.stderr)
        return 2
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    try:
        print(release_notes((ROOT / "CHANGELOG.md").read_text(), *(arguments or [project["version"]])))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    # The reader of the output may end first, as `head` does.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main(sys.argv[1:]))
