"""Delay before a process that has ended is started again."""

from __future__ import annotations

_FIRST_SECONDS = 0.1
_LONGEST_SECONDS = 10.0
# A process that ran for this long had started well.
_RECOVERED_SECONDS = 10.0


class RestartDelay:
    """Delays of one process: none after a long run, 0.1 s after a short one that served.

    A process that ended before it served cannot start at present. Its delays double from 0.1 s to 10 s. The first short
    run after a long one is not delayed, because its end may have nothing to do with its start.
    """

    def __init__(self) -> None:
        self._next = 0.0

    def after(self, lived: float, *, served: bool) -> float:
        """Return the delay after a run of `lived` seconds. `served` is whether the process was ready at its end."""
        if lived >= _RECOVERED_SECONDS:
            self._next = 0.0
        elif served:
            self._next = min(self._next, _FIRST_SECONDS)
        delay = self._next
        self._next = min(max(2 * delay, _FIRST_SECONDS), _LONGEST_SECONDS)
        return delay
