"""Files and directories that only their user can read, with any umask."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Any


def make_private_folder(folder: Path) -> None:
    """Make a directory and its missing parents, if it is missing."""
    for missing in reversed([each for each in (folder, *folder.parents) if not each.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)


def open_private(path: Path, mode: str) -> IO[Any]:
    """Open a file, as `open` does. It is private if this makes it."""
    return open(path, mode, opener=private_opener)


def private_opener(path: str, flags: int) -> int:
    """Return the descriptor of a file, as `opener` of `open`. The file is private if this makes it."""
    return os.open(path, flags, 0o600)
