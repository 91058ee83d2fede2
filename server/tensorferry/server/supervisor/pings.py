"""Pings: they find a child that lives but does nothing any more."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from tensorferry.server.supervisor.supervised_process import SupervisedProcess

_log = logging.getLogger("tensorferry.server")

PING_SECONDS = 10.0
# A child that answers none of this many pings is killed. Pings are counted, not seconds, because the whole machine may stand
# still. An engine has longer, because no other thread can run while it reads a large model.
FRONT_END_PINGS = 3
ENGINE_PINGS = 30


class Pings:
    """Sends a ping to each child that serves, every 10 s, and kills those that do not answer. Not thread-safe."""

    def __init__(self, now: float) -> None:
        # When the next pings are due.
        self.at = now + PING_SECONDS

    def send(self, processes: Iterable[SupervisedProcess], now: float) -> None:
        """Send the pings that are due."""
        self.at = now + PING_SECONDS
        for process in processes:
            if process.child is None or not process.serving:
                continue
            most = ENGINE_PINGS if process.index is None else FRONT_END_PINGS
            if process.unanswered_pings == most:
                _log.error("%s is killed, because it has not answered for %g s", process, most * PING_SECONDS)
                process.child.kill()
            process.unanswered_pings += 1
            process.child.send("ping", {})
