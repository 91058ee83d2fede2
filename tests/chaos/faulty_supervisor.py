"""`tensorferry` with front-ends, whose engine is `faulty_engine`. It imports no more than the supervisor needs."""

from __future__ import annotations

import faulthandler
import signal
import sys

from support.processes.children import serve_with_children

from tensorferry.server.__main__ import main

ENGINE_MODULE = "chaos.faulty_engine"

if __name__ == "__main__":
    # For analysis of a hang.
    faulthandler.register(signal.SIGUSR1)
    serve_with_children(engine_module=ENGINE_MODULE)
    sys.exit(main())
