"""Cores of the machine or container, and their division between server processes."""

from __future__ import annotations

import math
import os
from pathlib import Path

_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


def usable_cores(cpu_max: Path = _CPU_MAX) -> int:
    """Return the number of cores that the process may use.

    That is the number of its affinity, or the quota of its cgroup (version 2) if less. A part of a core counts as one.
    """
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = map(int, cpu_max.read_text().split())
    except (OSError, ValueError):
        # There is no cgroup, or its quota is "max".
        return allowed
    return max(1, min(allowed, math.ceil(quota / period)))


def session_threads(cores: int, processes: int) -> int:
    """Return the number of ONNX Runtime's threads for a session of one of several server processes."""
    return max(1, cores // processes)
