"""The supervisor with the small servers of `supervised_server`: `python supervised.py PROCESSES [OPTION ...]`.

It and the servers report what happens as lines of JSON on stderr.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from typing import Any

from tensorferry.server.errors import StartError
from tensorferry.server.processes.child import ExitStatus
from tensorferry.server.processes.event_loop import run_supervisor
from tensorferry.server.processes.log_output import configure
from tensorferry.server.processes.supervisor import SupervisorSettings

# From <sys/prctl.h>.
_PR_SET_CHILD_SUBREAPER = 36


def report(event: str, **fields: Any) -> None:
    os.write(2, (json.dumps({"event": event, "pid": os.getpid(), **fields}) + "\n").encode())


def supervise(argv: list[str]) -> int:
    if "leave-orphan" in argv:
        # As the kernel does for process 1 of a container.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    log = configure("text", "info")
    processes = int(argv[0])
    settings = SupervisorSettings(
        host="127.0.0.1",
        port=0,
        processes=processes,
        drain_seconds=30.0,
        gpus=tuple(f"gpu {index}" for index in range(processes)),
        module="support.processes.supervised_server",
    )
    if "supervisor-crashes" in argv:
        # A bug: the first end of a child has a status that it cannot have.
        ExitStatus.of = staticmethod(lambda status: None)  # type: ignore[assignment,method-assign]
    report("supervisor")
    try:
        return run_supervisor(settings, argv[1:], log.put)
    except StartError as error:
        log.put(f"tensorferry serve: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(supervise(sys.argv[1:]))
