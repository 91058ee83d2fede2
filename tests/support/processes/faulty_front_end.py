"""A front-end whose polling thread fails as that of `faulty.py`."""

from __future__ import annotations

import runpy

from support.processes.faulty import install_polling

install_polling()
runpy.run_module("tensorferry.server.front_end", run_name="__main__")
