"""A child process: `python -m tensorferry.server.worker_process SOCKET LIFELINE INPUTS OUTPUTS FILE MODEL`.

The first four are descriptors. The server starts it.
"""

from __future__ import annotations

import sys

from tensorferry.server.worker_process.function_process import run_process

if __name__ == "__main__":
    run_process(sys.argv[1:])
