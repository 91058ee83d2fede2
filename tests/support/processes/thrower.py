"""Exceptions in threads of real server processes, which `thrown/sitecustomize.py` throws there."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# What the log has of such an exception.
THROWN = "ThrownError"

_CODE = Path(__file__).with_name("thrown")
# The end of the name of grpcio's polling thread, whose end ends a process.
POLLING = "(_serve)"
# Threads of a server that are not the product's.
_OURS = "thrower"


def variables(folder: Path, python_path: str) -> Mapping[str, str]:
    """Return the environment of processes into whose threads exceptions can be thrown. The folder has a short path."""
    return {"THROWN_FOLDER": str(folder), "PYTHONPATH": os.pathsep.join([str(_CODE), python_path])}


def threads(folder: Path, process: int) -> Mapping[str, int]:
    """Return the names of the process's threads, with the number of exceptions that were raised there."""
    found: Mapping[str, int] = _ask(folder, process, None)
    return {name: count for name, count in found.items() if name != _OURS}


def throw(folder: Path, process: int, name: str, *, only_waiting: bool = False) -> bool:
    """Throw an exception into a thread, if it exists. It is raised when the thread runs next.

    With `only_waiting`, only if the thread waits for work.
    """
    return bool(_ask(folder, process, [name, only_waiting]))


def _ask(folder: Path, process: int, what: Any) -> Any:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(str(folder / str(process)))
        with connection.makefile("rw") as stream:
            stream.write(json.dumps(what) + "\n")
            stream.flush()
            if not (answer := stream.readline()):
                raise ConnectionResetError(f"process {process} ended before it answered")
            return json.loads(answer)
