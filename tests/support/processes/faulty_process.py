"""One of several server processes of `faulty`: `python -m support.processes.faulty_process DESCRIPTORS ARGUMENTS`."""

from __future__ import annotations

from support.processes.faulty import install_device, install_polling

from tensorferry.server.startup import run_child

if __name__ == "__main__":
    install_device()
    install_polling()
    run_child("tensorferry.server.processes.server")
