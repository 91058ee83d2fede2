"""Division of the cores between server and load, and processes that stay on their cores."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Layout:
    """Cores of the server (and of the bare loop), and of the load."""

    server: tuple[int, ...]
    load: int

    @classmethod
    def here(cls) -> Layout:
        """Give the server a quarter of this process's cores, at least one, and the load the last."""
        cores = sorted(os.sched_getaffinity(0))
        return cls(tuple(cores[: max(1, len(cores) // 4)]), cores[-1])

    def __str__(self) -> str:
        if self.load in self.server:
            return "one core for everything: the load takes time from the server, mistrust the figures"
        return f"{len(self.server)} of the cores for the server, 1 for the load"


@contextmanager
def on_cores(cores: Collection[int]) -> Iterator[None]:
    """Confine processes started inside to these cores, with all their threads; and this thread
    meanwhile.
    """
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def cpu_seconds(pid: int) -> float:
    """Return the processor time that a process has used."""
    return _seconds(Path(f"/proc/{pid}/stat"))


def thread_seconds(pid: int) -> dict[int, float]:
    """Return the processor time of each of its threads."""
    found = {}
    for entry in os.listdir(f"/proc/{pid}/task"):
        try:
            found[int(entry)] = _seconds(Path(f"/proc/{pid}/task/{entry}/stat"))
        except OSError:
            continue  # The thread has ended meanwhile.
    return found


def _seconds(stat: Path) -> float:
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICK


def end(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait up to `seconds` for a terminated process, then kill it."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
