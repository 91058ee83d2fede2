"""Programs for tests of the supervisor: the supervisor itself, and small children without grpc.

`python supervised.py FRONT_ENDS [OPTION ...]` runs the supervisor with this module's functions as children. Children report
what they get as lines of JSON on stderr.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from typing import Any

from tensorferry.server.errors import StartError
from tensorferry.server.supervisor import ChildProcess, Message, SupervisorSettings, run_supervisor
from tensorferry.server.supervisor.child import Ending
from tensorferry.server.supervisor.log_output import configure


def report(event: str, **fields: Any) -> None:
    os.write(2, (json.dumps({"event": event, "pid": os.getpid(), **fields}) + "\n").encode())


# From <sys/prctl.h>.
_PR_SET_CHILD_SUBREAPER = 36


def supervise(argv: list[str]) -> int:
    if "leave-orphan" in argv:
        # As the kernel does for process 1 of a container.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    log = configure("text", "info")
    settings = SupervisorSettings(
        host="127.0.0.1",
        port=0,
        front_ends=int(argv[0]),
        drain_seconds=30.0,
        engine_module="support.processes.supervised_engine",
        front_end_module="support.processes.supervised_front_end",
    )

    def print_ready(address: str, ready: dict[str, Any], listening: dict[str, Any]) -> None:
        print(json.dumps({"address": address, "ready": ready, "listening": listening}), flush=True)

    if "supervisor-crashes" in argv:
        # A bug: the first end of a child has an ending that it cannot have.
        Ending.of = staticmethod(lambda status: None)  # type: ignore[assignment,method-assign]
    heavy = [name for name in ("grpc", "google.protobuf", "numpy", "onnxruntime") if name in sys.modules]
    report("supervisor", modules=heavy, files=len(os.listdir("/proc/self/fd")))
    try:
        return run_supervisor(settings, argv[1:], create_link, print_ready, log.put)
    except StartError as error:
        log.put(f"tensorferry serve: {error}")
        return 1


def create_link() -> tuple[int, int, int]:
    memory = os.memfd_create("link")
    return memory, os.eventfd(0, os.EFD_CLOEXEC), os.eventfd(0, os.EFD_CLOEXEC)


def engine(argv: list[str]) -> None:
    """Engine that adds its process id to each link's memory."""
    child = ChildProcess(int(argv[0]))
    report("engine", start=child.start, argv=argv[1:], ignored=_ignored())

    def on_link(message: Message) -> None:
        memory, to_engine, to_front_end = message.take_fds(3)
        os.pwrite(memory, str(os.getpid()).encode(), 0)
        os.eventfd_write(to_front_end, 1)
        for fd in (memory, to_engine, to_front_end):
            os.close(fd)
        report("link", **message.fields)

    child.on("link", on_link)
    child.on("front_end_lost", lambda message: report("front_end_lost", **message.fields))
    child.on("drain", lambda message: report("drain", role="engine"))
    child.on("stop", lambda message: end("stop", "engine", argv))
    if "engine-fails" in argv:
        child.failed("no such model")
        os._exit(1)
    if "engine-exits" in argv:
        os._exit(3)
    if "leave-orphan" in argv:
        command = ["sh", "-c", "sleep 1000 >/dev/null 2>&1 & echo $!"]
        orphan = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
        report("orphan", orphan=int(orphan))
    child.run()
    child.send("ready", models=["m"])
    child.send("health", serving={"": True}, ready=True, loaded=True)
    threading.Event().wait()


def front_end(argv: list[str]) -> None:
    """Front-end that accepts connections on the port and sends its process id."""
    child = ChildProcess(int(argv[0]))
    index, port = child.start["front_end"], child.start["port"]
    report("front_end", start=child.start, argv=argv[1:], ignored=_ignored())
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listening.bind(("127.0.0.1", port))
    listening.listen()

    def on_link(message: Message) -> None:
        memory, to_engine, to_front_end = message.take_fds(3)
        os.eventfd_read(to_front_end)
        report("linked", front_end=index, engine=int(os.pread(memory, 100, 0)), path=message.fields["socket"])
        for fd in (memory, to_engine, to_front_end):
            os.close(fd)

    child.on("link", on_link)
    child.on("engine_lost", lambda message: report("engine_lost", front_end=index, **message.fields))
    child.on("health", lambda message: report("health", front_end=index, **message.fields))
    child.on("drain", lambda message: end("drain", "front_end", argv))
    child.run()
    child.send("listening", port=port)
    while True:
        connection, _ = listening.accept()
        with connection:
            connection.sendall(str(os.getpid()).encode())


def end(event: str, role: str, argv: list[str]) -> None:
    report(event, role=role)
    if f"{role}-hangs" not in argv:
        os._exit(0)


def _ignored() -> list[str]:
    return [n.name for n in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(n) is signal.SIG_IGN]


if __name__ == "__main__":
    sys.exit(supervise(sys.argv[1:]))
