"""Child of the supervisor that does one thing: `exit STATUS`, `signal NUMBER`, `read` (until the end of file) or `hang`."""

from __future__ import annotations

import os
import signal
import socket
import sys

from tensorferry.server.processes.control import ControlChannel

channel = ControlChannel(socket.socket(fileno=int(sys.argv[1])))
match sys.argv[2:]:
    case ["exit", status]:
        os._exit(int(status))
    case ["signal", number]:
        os.kill(os.getpid(), int(number))
    case ["read"]:
        while (message := channel.receive()) is not None:
            channel.send(message.kind, message.fields)
    case ["inherit", fd, variable]:
        channel.send("inherited", {"content": os.read(int(fd), 100).decode(), "value": os.environ[variable]})
    case ["hang"]:
        channel.send("here", {})
        signal.pause()
