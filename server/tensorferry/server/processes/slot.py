"""One of the server processes: which child is it now, and when is the next one started."""

from __future__ import annotations

import math

from tensorferry.server.processes.child import Child
from tensorferry.server.processes.restart_delay import RestartDelay


class ServerSlot:
    """The server process of an index. A child that ends is replaced by one of the next generation.

    It has the file of the page in which its child notes the requests that run.
    """

    def __init__(self, index: int, page: int) -> None:
        self.index = index
        self.page = page
        self.generation = 0
        self.child: Child | None = None
        # Whether the child has reported that it is ready.
        self.serving = False
        # Pings since the child's last answer.
        self.unanswered_pings = 0
        # Times of the supervisor's clock; infinite if there is nothing to do.
        self.start_at = math.inf
        self.kill_at = math.inf
        self._started_at = 0.0
        self._ended_at = -math.inf
        self._delay = RestartDelay()

    def begin(self, now: float) -> None:
        """Count a start. The caller starts the child."""
        self.generation += 1
        self.unanswered_pings = 0
        self.start_at = math.inf
        self._started_at = now

    def end(self, now: float) -> float:
        """Forget the child. Return the delay before the next start."""
        delay = self._delay.after(now - self._started_at, served=self.serving)
        self.child = None
        self.serving = False
        self.kill_at = math.inf
        self._ended_at = now
        return delay

    def down_seconds(self, now: float) -> float:
        """Return the time since the last child ended; infinite if none has."""
        return now - self._ended_at

    def kill_after(self, seconds: float, now: float) -> None:
        """Let `kill_at` be at most `seconds` from now."""
        self.kill_at = min(self.kill_at, now + seconds)

    @property
    def restarts(self) -> int:
        """Number of starts after the first."""
        return max(0, self.generation - 1)

    @property
    def state(self) -> str:
        """State for operators: serving, starting, waiting (for its next start) or ended."""
        if self.child is not None:
            return "serving" if self.serving else "starting"
        return "ended" if math.isinf(self.start_at) else "waiting"

    def __str__(self) -> str:
        return self.name if self.child is None else f"{self.name} (process {self.child.pid})"

    @property
    def name(self) -> str:
        """The name for operators."""
        return f"server {self.index}"
