"""What gRPC core needs of this process: environment variables before it is loaded, and the scheduling of its threads."""

from __future__ import annotations

import os
from pathlib import Path

# Core logs clients' mistakes as errors, for instance a header that it cannot parse, so any client could fill the log.
# grpcio raises the errors of core that the server must handle.
_VERBOSITY = "GRPC_VERBOSITY"

# Names of core's threads, as of grpcio 1.85. Their new threads have the scheduling policy of the thread that starts them.
_CORE_THREADS = ("event_engine", "lifeguard")


def prepare() -> None:
    """Keep core silent unless the operator has set its verbosity. Call this before grpc is imported."""
    os.environ.setdefault(_VERBOSITY, "NONE")


def read_in_batches() -> None:
    """Let core's threads interrupt no running thread when they wake (SCHED_BATCH). Call this once the server has started.

    On a free processor they run at once. On a busy one each arriving message would interrupt the thread that handles calls,
    and the server would carry less the more calls wait. Instead the messages that arrived meanwhile are read together.
    """
    for thread in Path("/proc/self/task").iterdir():
        try:
            if (thread / "comm").read_text().strip() not in _CORE_THREADS:
                continue
            number = int(thread.name)
            if os.sched_getscheduler(number) == os.SCHED_OTHER:
                os.sched_setscheduler(number, os.SCHED_BATCH, os.sched_param(0))
        except OSError:
            # The thread has ended, or a sandbox forbids this.
            continue
