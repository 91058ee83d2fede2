"""The processes of a server of several, as its supervisor reports them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """A process that the supervisor keeps running.

    `generation` counts its starts from 1. `pid` is None while it is not running. `state` is starting, serving, waiting
    (for its next start) or ended. `resident_bytes` is its memory, with the part that it shares with others; None if it is
    unknown.
    """

    name: str
    pid: int | None
    generation: int
    state: str
    restarts: int
    resident_bytes: int | None = None


def process_statuses(reported: Sequence[Mapping[str, Any]]) -> Sequence[ProcessStatus]:
    """Return the processes of the supervisor's last message, with their memory at the moment."""
    return [ProcessStatus(**each, resident_bytes=resident_bytes(each["pid"])) for each in reported]


def resident_bytes(pid: int | None) -> int | None:
    """Return the resident memory of a process; None if it is not running or cannot be read."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except (OSError, IndexError):
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
