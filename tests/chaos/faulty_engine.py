"""The engine with the built-in faults of `faulty_server`, as a child of `faulty_supervisor`."""

from __future__ import annotations

import runpy

from chaos import faulty_server

if __name__ == "__main__":
    faulty_server.prepare()
    runpy.run_module("tensorferry.server.engine", run_name="__main__")
