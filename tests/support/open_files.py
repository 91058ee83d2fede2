"""The descriptors that this process has open, told apart by the files behind them."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def open_files() -> set[tuple[int, str]]:
    """Return each descriptor with the identity of its file.

    Compare two of them by subtraction, never by length. What earlier tests of
    the process left behind may be closed at any time, and a descriptor that
    was closed may be opened for another file.
    """
    files: set[tuple[int, str]] = set()
    for name in os.listdir("/proc/self/fd"):
        # The descriptor of this listing, or one that another thread closes.
        with suppress(FileNotFoundError):
            files.add((int(name), _identity(name)))
    return files


def _identity(name: str) -> str:
    target = os.readlink(f"/proc/self/fd/{name}")
    if target == "anon_inode:[eventfd]":
        lines = Path(f"/proc/self/fdinfo/{name}").read_text().splitlines()
        return next((line for line in lines if line.startswith("eventfd-id")), target)
    return f"{target} {os.stat(f'/proc/self/fd/{name}').st_ino}"
