"""The child processes of this process, zombies included."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def child_processes() -> set[int]:
    """Return the ids of all children, by whichever thread they were started.

    Compare two of them by subtraction, because other tests of the process may have children that live on, such as
    multiprocessing's resource tracker.
    """
    children: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        # A thread may end meanwhile. Its children are then those of another thread.
        with suppress(FileNotFoundError, ProcessLookupError):
            children.update(map(int, (task / "children").read_text().split()))
    return children
