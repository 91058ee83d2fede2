"""Child of the supervisor that does one thing: `exit STATUS`, `signal NUMBER`, `read` (until the end of file) or `hang`."""

from __future__ import annotations

import os
import signal
import socket
import sys

from tensorferry.server.supervisor.control import ControlChannel

channel = ControlChannel(socket.socket(fileno=int(sys.argv[1])))
match sys.argv[2:]:
    case ["exit", status]:
        os._exit(int(status))
    case ["signal", number]:
        os.kill(os.getpid(), int(number))
    case ["read"]:
        while (message := channel.receive()) is not None:
            fds = message.take_fds(message.fields.pop("fds", 0))
            channel.send(message.kind, {**message.fields, "fds": len(fds)})
    case ["hang"]:
        channel.send("here", {})
        signal.pause()
