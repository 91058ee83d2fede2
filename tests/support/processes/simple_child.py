"""Child process that does one thing, such as `exit STATUS`, `signal NUMBER`, `read` (until the end of file) or `hang`."""

from __future__ import annotations

import os
import signal
import sys

from tensorferry.server.processes.in_child import Parent

parent = Parent(sys.argv[1], 1 << 30)
match sys.argv[2:]:
    case ["exit", status]:
        os._exit(int(status))
    case ["signal", number]:
        os.kill(os.getpid(), int(number))
    case ["read"]:
        while (message := parent.receive()) is not None:
            parent.send(*message)
    case ["hang"]:
        parent.send("here")
        signal.pause()
