"""One of the server processes: which child it is, whether that works, and when the next one is started."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from tensorferry.server.processes.child import Child, RestartDelay
from tensorferry.server.processes.running_page import create_page, read_page

_log = logging.getLogger("tensorferry.server")

PING_SECONDS = 10.0
# A process that answers none of this many pings is killed. Pings are counted, not seconds, because the whole machine may
# stand still. While models load or run, native code may let no other thread run.
_IDLE_PINGS = 3
_BUSY_PINGS = 30


class ServerSlot:
    """The server process of an index. A child that ends is replaced by one of the next generation.

    It has the file of the page in which its child notes the requests that run.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.page = create_page()
        self.generation = 0
        self.child: Child | None = None
        # Whether the child has reported that it is ready.
        self.serving = False
        # Whether the last child must drain.
        self.draining = False
        # Pings since the child's last answer.
        self.unanswered_pings = 0
        # Times of the supervisor's clock; infinite if there is nothing to do.
        self.start_at = math.inf
        self.kill_at = math.inf
        self._started_at = 0.0
        # When the last child ended.
        self.ended_at = -math.inf
        self._delay = RestartDelay()

    def begin(self, now: float) -> None:
        """Count a start. The caller starts the child."""
        self.generation += 1
        self.draining = False
        self.unanswered_pings = 0
        self.start_at = math.inf
        self._started_at = now

    def end(self, now: float) -> float:
        """Forget the child. Return the delay before the next start."""
        delay = self._delay.after(now - self._started_at, served=self.serving)
        self.child = None
        self.serving = False
        self.kill_at = math.inf
        self.ended_at = now
        return delay

    def ping(self) -> None:
        """Ask the child for a sign if it serves, and kill it if it has given none for too long.

        It answers through its working thread, which serves all calls.
        """
        if self.child is None or not self.serving:
            return
        loads, running = read_page(self.page)
        if self.unanswered_pings >= (_BUSY_PINGS if loads or running else _IDLE_PINGS):
            seconds = self.unanswered_pings * PING_SECONDS
            _log.error("%s is killed, because it has not answered for %g s", self, seconds)
            self.child.kill()
        self.unanswered_pings += 1
        self.child.send("ping", {})

    def kill_after(self, seconds: float, now: float) -> None:
        """Let `kill_at` be at most `seconds` from now."""
        self.kill_at = min(self.kill_at, now + seconds)

    @property
    def restarts(self) -> int:
        """Number of starts after the first."""
        return max(0, self.generation - 1)

    @property
    def name(self) -> str:
        """The name for operators."""
        return f"server {self.index}"

    def __str__(self) -> str:
        return self.name if self.child is None else f"{self.name} (process {self.child.pid})"

    def described(self) -> Mapping[str, Any]:
        """Return the fields that describe it to all processes. A child that is `waiting` has not been started yet."""
        if self.child is not None:
            state = "serving" if self.serving else "starting"
        else:
            state = "ended" if math.isinf(self.start_at) else "waiting"
        return {
            "name": self.name,
            "pid": None if self.child is None else self.child.pid,
            "generation": self.generation,
            "restarts": self.restarts,
            "state": state,
        }
