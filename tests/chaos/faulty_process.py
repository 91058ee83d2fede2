"""A server process with the built-in faults of `faulty_server`, as a child of `faulty_supervisor`."""

from __future__ import annotations

from chaos import faulty_server

from tensorferry.server.startup import run_child

if __name__ == "__main__":
    faulty_server.prepare()
    run_child("tensorferry.server.processes.server")
