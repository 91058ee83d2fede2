"""`tensorferry` on a device of its own, as a GPU would be: the host's core is free while a batch runs.

Run as a program. Each run waits for as long as the device would take, which the environment says, and then runs the
model, which should be a small one.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from tensorferry.server.__main__ import main
from tensorferry.server.transport import grpc_environment

# The time of a batch, in milliseconds: "FIXED,PER_ROW".
COST = "APART_COST_MS"


def wait_as_a_device() -> None:
    """From now on each run of a session takes its time."""
    # As the command does, before grpc is loaded.
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
