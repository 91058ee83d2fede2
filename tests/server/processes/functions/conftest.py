from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.open_files import open_files
from support.processes.observed import own_children
from support.server import worker_app

from tensorferry.server.processes.functions.worker_process import WorkerProcess

Start = Callable[..., WorkerProcess]
APP = Path(worker_app.__file__)


@pytest.fixture
def started() -> Iterator[Start]:
    """Start a process of a function; the test fails if a file, a process or a zombie is left after `close`."""
    before, children = open_files(), own_children()
    processes: list[WorkerProcess] = []

    def start(model: str = "act", app: Path = APP, **options: Any) -> WorkerProcess:
        processes.append(WorkerProcess(app, model, name=f"model {model}, process 1", **options))
        return processes[-1]

    yield start
    for process in processes:
        process.close()
        process.close()
        assert process.pid is None
    assert not open_files() - before
    assert not own_children() - children
