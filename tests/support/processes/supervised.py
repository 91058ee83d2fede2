"""The supervisor with small servers, whose module this is, too: `python supervised.py PROCESSES [OPTION ...]`.

Both report what happens as lines of JSON on stderr.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from typing import Any

from tensorferry.server.errors import StartError
from tensorferry.server.processes.child import ExitStatus
from tensorferry.server.processes.event_loop import run_supervisor
from tensorferry.server.processes.in_child import Parent
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
        module="support.processes.supervised",
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


def serve(descriptors: str, argv: list[str]) -> None:
    """Accept connections on the port, and send the process id."""
    supervisor = Parent(descriptors)
    message = supervisor.receive()
    assert message is not None
    start = message.fields
    # The server would end with its default actions.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(os.getpid(), number)
    report("server", start=start, argv=argv, gpus=os.environ["CUDA_VISIBLE_DEVICES"])
    if "leave-orphan" in argv:
        command = ["sh", "-c", "sleep 1000 >/dev/null 2>&1 & echo $!"]
        orphan = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
        report("orphan", orphan=int(orphan))
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listening.bind(("127.0.0.1", start["port"]))
    listening.listen()

    def drain(fields: dict[str, Any]) -> None:
        report("drain")
        os._exit(0)

    supervisor.obey(
        {
            "drain": drain,
            "print_ready": lambda fields: print(start["address"], flush=True),
        }
    )
    supervisor.send("ready")
    report("ready", index=start["index"])
    while True:
        connection, _ = listening.accept()
        with connection:
            connection.sendall(str(os.getpid()).encode())


if __name__ == "__main__":
    if "," in sys.argv[1]:
        # The descriptors of a child.
        serve(sys.argv[1], sys.argv[2:])
    else:
        sys.exit(supervise(sys.argv[1:]))
