"""Which of the signals that stop a server count."""

from __future__ import annotations

import time
from collections.abc import Callable

# Signals within this time of the first are the first again.
_SAME_SECONDS = 1.0


class StopSignals:
    """Counts signals that ask the process to stop. `now` returns monotonic seconds. Only for one thread.

    One request to stop can be several signals: GNU timeout sends one to the process and another to its process group.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._first: float | None = None

    def counts(self) -> bool:
        """Return whether a signal that was received at this moment is another request to stop."""
        if self._first is None:
            self._first = self._now()
            return True
        return self._now() - self._first > _SAME_SECONDS
