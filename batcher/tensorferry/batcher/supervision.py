"""Threads that last: what escapes from their work is put right, and the work begun again."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

from tensorferry.batcher.clock import Clock, MonotonicClock

_FIRST_SECONDS, _LONGEST_SECONDS = 0.01, 1.0
# Work that went on for so long after a pause has recovered.
_RECOVERED_SECONDS = 60.0


class Pauses:
    """Between a fault and the next beginning: a moment, and twice as long each time, up to a second. Thread-safe.

    So a fault that comes back at once takes neither a core nor the log for itself, and one that comes alone is hardly felt.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or MonotonicClock()
        # Notified by `end`. Guards the rest; nothing but waiting is done while it is held.
        self._over = threading.Condition()
        self._ended = False
        self._seconds = 0.0
        self._last = -math.inf

    def take(self) -> None:
        """Waits for the next one to pass, or for `end`."""
        with self._over:
            now = self._clock.now()
            recovered = now >= self._last + _RECOVERED_SECONDS
            self._seconds = _FIRST_SECONDS if recovered else min(2 * self._seconds, _LONGEST_SECONDS)
            self._last = now + self._seconds
            while not self._ended and self._clock.now() < self._last:
                self._clock.wait(self._over, self._last)

    def end(self) -> None:
        """No more of them, since the thread is to end. Idempotent."""
        with self._over:
            self._ended = True
            self._over.notify_all()


def last(
    work: Callable[[], None], mend: Callable[[BaseException], None], pauses: Pauses | None = None
) -> None:
    """Calls `work` until it returns.

    Whatever escapes from it, be it SystemExit, goes to `mend`, which says what happened and puts right what was left
    half done; then, after a pause, `work` is called again. So does what escapes from `mend`. Without `pauses`, it is
    `mend` that waits a moment, or sees to it that `work` does.
    """
    fault: BaseException | None = None
    while True:
        try:
            if fault is not None:
                mending, fault = fault, None
                try:
                    mend(mending)
                finally:
                    # Its traceback knows the frames that fell, and what they held.
                    del mending
                    if pauses is not None:
                        pauses.take()
            work()
            return
        except BaseException as error:
            fault = error
