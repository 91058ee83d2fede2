"""Free ports for servers that cannot choose one themselves."""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence
from contextlib import ExitStack, suppress

# Linux gives none of these to other programs, such as servers on port 0, before the chosen ones are used.
_PORTS = range(10_000, 32_768)


def free_ports(count: int) -> Sequence[int]:
    """Return ports of 127.0.0.1 that no program has now."""
    found: list[int] = []
    with ExitStack() as stack:
        for port in random.sample(_PORTS, len(_PORTS)):
            listener = stack.enter_context(socket.socket())
            with suppress(OSError):
                listener.bind(("127.0.0.1", port))
                found.append(port)
            if len(found) == count:
                return found
    raise OSError(f"fewer than {count} ports are free")
