"""Another module for the processes of `tensorferry serve --processes`."""

from __future__ import annotations

from functools import partial
from typing import Any

from tensorferry.server.cli import serve


def serve_with_children(module: str) -> None:
    """Start this module as each server process. It must be importable by PYTHONPATH."""
    command: Any = serve
    command.SupervisorSettings = partial(command.SupervisorSettings, module=module)
