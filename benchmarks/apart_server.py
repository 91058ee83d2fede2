"""`tensorferry` with a simulated device: the host's core is idle while a batch runs, as with a GPU.

Each run waits for the time of a device, which an environment variable gives, and then runs the
model, which should be small.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from tensorferry.server.__main__ import main
from tensorferry.server.transport import grpc_environment

# Time of a batch in milliseconds, as "FIXED,PER_ROW".
COST = "APART_COST_MS"


def wait_as_a_device() -> None:
    """Make every run of a session take its time from now on."""
    # Like the command, before grpc is loaded.
    grpc_environment.prepare()
    from tensorferry.server.runtime.session import Session

    fixed, per_row = (float(part) / 1e3 for part in os.environ[COST].split(","))
    run = Session.run

    def apart(session: Session, inputs: Mapping[str, Any]) -> Any:
        time.sleep(fixed + per_row * len(next(iter(inputs.values()))))
        return run(session, inputs)

    Session.run = apart  # type: ignore[assignment]


if __name__ == "__main__":
    wait_as_a_device()
    sys.exit(main())
