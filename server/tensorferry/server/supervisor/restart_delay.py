"""Delay before a process that has ended is started again."""

from __future__ import annotations

_FIRST_SECONDS = 0.1
_LONGEST_SECONDS = 10.0
# A process that ran for this long had started well.
_RECOVERED_SECONDS = 10.0


class RestartDelay:
    """Delays of one process: none after a good run, else 0.1 s, then twice as long each time, up to 10 s."""

    def __init__(self) -> None:
        self._next = 0.0

    def after(self, lived: float) -> float:
        """Return the delay after a process that ran for `lived` seconds.

        The first short run after a good one is not delayed either, because its end may have nothing to do with its start.
        """
        if lived >= _RECOVERED_SECONDS:
            self._next = 0.0
        delay = self._next
        self._next = min(max(2 * delay, _FIRST_SECONDS), _LONGEST_SECONDS)
        return delay
