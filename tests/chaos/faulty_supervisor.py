"""`tensorferry` with front-ends, whose engine is `faulty_engine`. It imports no more than the supervisor needs."""

from __future__ import annotations

import faulthandler
import signal
import sys
from functools import partial
from typing import Any

from tensorferry.server.__main__ import main
from tensorferry.server.cli import serve
from tensorferry.server.supervisor import SupervisorSettings

ENGINE_MODULE = "chaos.faulty_engine"

if __name__ == "__main__":
    # For analysis of a hang.
    faulthandler.register(signal.SIGUSR1)
    command: Any = serve
    command.SupervisorSettings = partial(SupervisorSettings, engine_module=ENGINE_MODULE)
    sys.exit(main())
