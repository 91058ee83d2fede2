"""Available memory of the machine or container, and checks that a model fits."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tensorferry.server.errors import StartError

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")
_STATM = Path("/proc/self/statm")
_GIB = 1 << 30

_T = TypeVar("_T")


def available_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """Return the memory that the process can still allocate: the machine's, or its cgroup's (version 2) if less."""
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    machine = int(fields["MemAvailable"].split()[0]) * 1024
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        cache = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        # No cgroup has a limit.
        return machine
    if limit == "max":
        return machine
    # The kernel drops the file cache before it refuses memory.
    return max(0, min(machine, int(limit) - used + int(cache.get("inactive_file", 0))))


def resident_bytes() -> int:
    """Return the resident memory of the process."""
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def check_fits(what: str, size: int, remedy: str) -> None:
    """Raise StartError if `what` needs more bytes than are available. `remedy` says what to change."""
    left = available_bytes()
    if size > left:
        raise StartError(
            f"{what} takes at least {size / _GIB:.2f} GiB, and {left / _GIB:.2f} GiB of memory are available; {remedy}"
        )


class GrowthCheck:
    """Check before each step of something that grows that its memory is available. Not thread-safe."""

    def __init__(self) -> None:
        self._first = resident_bytes()

    def check(self, what: str, remedy: str, steps: int = 1) -> None:
        """Raise StartError if the next step, `what`, would not fit. `remedy` says what to change.

        The step is expected to take as much as the average of the `steps` so far. Use one step if each step doubles.
        """
        if steps:
            check_fits(what, (resident_bytes() - self._first) // steps, remedy)


class BatchMemory:
    """Memory of a session's batches, learned from those that ran. One thread at a time may use it.

    `input` names an input that has the rows. A run with at most `rows` rows needs no check.
    """

    def __init__(self, input: str) -> None:
        self.input = input
        self.rows = 0
        # What batches of up to `rows` rows have taken.
        self._bytes = 0

    def run(self, rows: int, run: Callable[[], _T]) -> _T:
        """Run a batch with more rows than any before. MemoryError if it is not expected to fit.

        It is expected to take as many times the memory as it has more rows.
        """
        if self.rows:
            more = self._bytes * (rows - self.rows) // self.rows
            if more > (left := available_bytes()):
                raise MemoryError(
                    f"a batch of {rows} rows is expected to take {more / _GIB:.2f} GiB more than one of {self.rows}, and "
                    f"{left / _GIB:.2f} GiB of memory are available"
                )
        before = resident_bytes()
        result = run()
        self._bytes += max(0, resident_bytes() - before)
        self.rows = rows
        return result
