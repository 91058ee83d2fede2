"""State of a server as a whole, and of the processes of a server of several, as its supervisor reports them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import grpc


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


@dataclass(frozen=True, slots=True)
class ServerStatistics:
    """State of the server as a whole, in addition to the counts of its models' batchers.

    `refused` counts by code the requests that were answered before they reached a model's queue. `transport` names
    the transport of the inference methods. `unsent_bytes` is the size of responses that clients have yet to read.
    `call_threads` counts threads in the pools for calls, which are started on demand. `http_connections` are those of
    --http-port. `processes` is empty if one process does all.
    """

    release: str
    transport: str
    ready: bool
    open_streams: int = 0
    call_threads: int = 0
    unsent_bytes: int = 0
    refused: Mapping[grpc.StatusCode, int] = field(default_factory=dict)
    processes: Sequence[ProcessStatus] = ()
    http_connections: int = 0


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
