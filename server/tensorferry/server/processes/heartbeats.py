"""Heartbeats: they find a server process that lives but serves nothing any more."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from tensorferry.server.processes.running_page import read_page
from tensorferry.server.processes.slot import ServerSlot

_log = logging.getLogger("tensorferry.server")

PING_SECONDS = 10.0
# A process that answers none of this many pings is killed. Pings are counted, not seconds, because the whole machine may
# stand still. While models load or run, native code may let no other thread run.
IDLE_PINGS = 3
BUSY_PINGS = 30


class Heartbeats:
    """Asks each process that serves for a sign, every 10 s, and kills those that give none. Not thread-safe.

    A process answers through its working thread, which serves all calls.
    """

    def __init__(self, now: float) -> None:
        # When the next pings are due.
        self.at = now + PING_SECONDS

    def ask(self, slots: Iterable[ServerSlot], now: float) -> None:
        """Send the pings that are due."""
        self.at = now + PING_SECONDS
        for slot in slots:
            if slot.child is None or not slot.serving:
                continue
            loads, running = read_page(slot.page)
            most = BUSY_PINGS if loads or running else IDLE_PINGS
            if slot.unanswered_pings >= most:
                seconds = slot.unanswered_pings * PING_SECONDS
                _log.error("%s is killed, because it has not answered for %g s", slot, seconds)
                slot.child.kill()
            slot.unanswered_pings += 1
            slot.child.send("ping", {})
