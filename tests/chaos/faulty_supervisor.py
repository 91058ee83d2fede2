"""`tensorferry` of several processes, each a `faulty_process`. It imports no more than the supervisor needs."""

from __future__ import annotations

import faulthandler
import signal
import sys

from support.processes.children import serve_with_children

from tensorferry.server.__main__ import main

MODULE = "chaos.faulty_process"

if __name__ == "__main__":
    # For analysis of a hang.
    faulthandler.register(signal.SIGUSR1)
    serve_with_children(MODULE)
    sys.exit(main())
