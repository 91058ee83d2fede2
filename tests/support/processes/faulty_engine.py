"""The engine of a server with front-ends, on the device of `faulty.py`."""

from __future__ import annotations

import runpy

from support.processes.faulty import install_device

install_device()
runpy.run_module("tensorferry.server.engine", run_name="__main__")
