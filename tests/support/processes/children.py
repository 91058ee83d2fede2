"""Other modules for the processes of `tensorferry serve --front-ends`."""

from __future__ import annotations

from functools import partial
from typing import Any

from tensorferry.server.cli import serve
from tensorferry.server.supervisor import SupervisorSettings


def serve_with_children(engine: str, front_end: str) -> None:
    """Start these modules as the engine and as front-ends. They must be importable by PYTHONPATH."""
    command: Any = serve
    command.SupervisorSettings = partial(SupervisorSettings, engine_module=engine, front_end_module=front_end)
