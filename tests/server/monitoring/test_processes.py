"""Processes of a server with front-ends, as the status page shows them."""

from __future__ import annotations

import os
from typing import Any

from tensorferry.server.monitoring.processes import ProcessStatus, process_statuses


def test_memory_is_added_to_the_supervisor_s_report() -> None:
    reported: list[dict[str, Any]] = [
        {"name": "the engine", "pid": os.getpid(), "generation": 2, "state": "serving", "restarts": 1},
        {"name": "front-end 0", "pid": None, "generation": 1, "state": "waiting", "restarts": 0},
    ]
    engine, front_end = process_statuses(reported)
    assert (engine.name, engine.kind, engine.pid, engine.restarts) == ("engine", "engine", os.getpid(), 1)
    assert engine.resident_bytes is not None
    assert engine.resident_bytes > 1 << 20
    assert front_end == ProcessStatus("front-end 0", None, 1, "waiting", 0, None)
    assert front_end.kind == "front_end"


def test_a_process_that_has_ended_since_has_no_memory() -> None:
    # Above the largest process id of Linux.
    (gone,) = process_statuses(
        [{"name": "front-end 1", "pid": 1 << 23, "generation": 1, "state": "serving", "restarts": 0}]
    )
    assert gone.resident_bytes is None
