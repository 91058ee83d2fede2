"""Child of the supervisor in tests: it accepts connections on the port, and sends its process id."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from typing import Any

from support.processes.supervised import report

from tensorferry.server.processes.in_child import Parent


def main(descriptors: str, argv: list[str]) -> None:
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
    main(sys.argv[1], sys.argv[2:])
