"""Memory of this machine, or of the container that the process is in, and what still fits it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from tensorferry.server.errors import StartError

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")
_STATM = Path("/proc/self/statm")
_GIB = 1 << 30


def available_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """How much more the process can use: what the machine has left, or its cgroup (version 2) if that is less."""
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    machine = int(fields["MemAvailable"].split()[0]) * 1024
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        cache = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        # There is no cgroup with a limit.
        return machine
    if limit == "max":
        return machine
    # The kernel drops the file cache before it refuses memory.
    return max(0, min(machine, int(limit) - used + int(cache.get("inactive_file", 0))))


def resident_bytes() -> int:
    """How much memory the process has now."""
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def check_fits(what: str, size: int, cure: str, available: Callable[[], int] = available_bytes) -> None:
    """StartError where `size` bytes are more than what is available; `what` takes them, and `cure` says what to change."""
    left = available()
    if size > left:
        raise StartError(
            f"{what} takes at least {size / _GIB:.2f} GiB, and {left / _GIB:.2f} GiB of memory are available; {cure}"
        )


class GrowthCheck:
    """Refuses the next step of something that grows, where the memory for it is not there. Not thread-safe."""

    def __init__(
        self,
        available: Callable[[], int] = available_bytes,
        resident: Callable[[], int] = resident_bytes,
    ) -> None:
        self._available = available
        self._resident = resident
        self._first = resident()

    def check(self, what: str, cure: str, steps: int = 1) -> None:
        """StartError where the next step, `what`, would not fit; `cure` says what to change.

        It is expected to take as much as each of the equal `steps` since this was made did. One step stands for all of
        them where they double.
        """
        if steps:
            check_fits(what, (self._resident() - self._first) // steps, cure, self._available)
