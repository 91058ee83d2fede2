"""Files and directories that only their user can read, with any umask."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Any

_FOLDER_MODE = 0o700
_FILE_MODE = 0o600


def make_private_folder(folder: Path) -> None:
    """Make a directory and its missing parents, if it is missing."""
    for missing in reversed([each for each in (folder, *folder.parents) if not each.exists()]):
        missing.mkdir(mode=_FOLDER_MODE, exist_ok=True)


def open_private(path: Path, mode: str) -> IO[Any]:
    """Open a file, as `open` does. It is private if this makes it."""
    return open(path, mode, opener=lambda name, flags: os.open(name, flags, _FILE_MODE))


def make_private(folder: Path) -> None:
    """Take the rights of other users to a directory, and to everything in it. Nothing is done if they have none to it."""
    if not folder.stat().st_mode & 0o077:
        return
    for root, _, files in os.walk(folder):
        for name in files:
            # Not what a link refers to.
            if not os.path.islink(path := os.path.join(root, name)):
                os.chmod(path, _FILE_MODE)
        if root != str(folder):
            os.chmod(root, _FOLDER_MODE)
    # Last, so that it is done again if this process ends meanwhile.
    folder.chmod(_FOLDER_MODE)
