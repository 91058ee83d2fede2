"""Other modules for the processes of `tensorferry serve --front-ends`."""

from __future__ import annotations

from functools import partial
from typing import Any

from tensorferry.server.cli import serve


def serve_with_children(**modules: str) -> None:
    """Start these modules, `engine_module` or `front_end_module`. They must be importable by PYTHONPATH."""
    command: Any = serve
    command.SupervisorSettings = partial(command.SupervisorSettings, **modules)
