"""A server process: `python -m tensorferry.server.processes DESCRIPTORS ARGUMENTS`. The supervisor starts it."""

from __future__ import annotations

from tensorferry.server.startup import run_child

if __name__ == "__main__":
    run_child("tensorferry.server.processes.server")
