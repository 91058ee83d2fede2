"""The processes of a server, as the status page shows them."""

from __future__ import annotations

import os
from typing import Any

from tensorferry.server.observability.monitoring.processes import ProcessStatus, process_statuses


def test_memory_is_added_to_the_supervisor_s_report() -> None:
    reported: list[dict[str, Any]] = [
        {"name": "server 0", "pid": os.getpid(), "generation": 2, "state": "serving", "restarts": 1},
        {"name": "server 1", "pid": None, "generation": 1, "state": "waiting", "restarts": 0},
    ]
    lives, waits = process_statuses(reported)
    assert (lives.name, lives.pid, lives.restarts) == ("server 0", os.getpid(), 1)
    assert lives.resident_bytes is not None
    assert lives.resident_bytes > 1 << 20
    assert waits == ProcessStatus("server 1", None, 1, "waiting", 0, None)


def test_a_process_that_has_ended_since_has_no_memory() -> None:
    # Above the largest process id of Linux.
    (gone,) = process_statuses(
        [{"name": "server 1", "pid": 1 << 23, "generation": 1, "state": "serving", "restarts": 0}]
    )
    assert gone.resident_bytes is None
