"""Supervised threads: an exception is reported and the work restarted with exponential back-off."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

from tensorferry.batcher.clock import Clock, MonotonicClock

_FIRST_SECONDS, _MAX_SECONDS = 0.01, 1.0
# Work that went on for this long after a restart has recovered.
_RECOVERED_SECONDS = 60.0


class RestartBackoff:
    """Pauses before restarts: short at first, then twice as long each time, up to a second. Thread-safe.

    So a fault that repeats at once takes neither a core nor the log for itself, and a single one costs little.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or MonotonicClock()
        # Notified by `end`. Guards the fields below; nothing but waiting is done while it is held.
        self._over = threading.Condition()
        self._ended = False
        self._seconds = 0.0
        self._last = -math.inf

    def wait(self) -> None:
        """Wait until the next pause is over, or `end` is called."""
        with self._over:
            now = self._clock.now()
            recovered = now >= self._last + _RECOVERED_SECONDS
            self._seconds = _FIRST_SECONDS if recovered else min(2 * self._seconds, _MAX_SECONDS)
            self._last = now + self._seconds
            while not self._ended and self._clock.now() < self._last:
                self._clock.wait(self._over, self._last)

    def end(self) -> None:
        """End the current pause, and all later ones at once. Idempotent."""
        with self._over:
            self._ended = True
            self._over.notify_all()


def supervise(
    run: Callable[[], None], on_crash: Callable[[BaseException], None], backoff: RestartBackoff | None = None
) -> None:
    """Call `run` until it returns.

    Any exception, even SystemExit, is passed to `on_crash`, which reports it and cleans up; so is an exception of `on_crash`
    itself. After a pause `run` is called again. Without `backoff`, `on_crash` itself must limit the rate of restarts.
    """
    fault: BaseException | None = None
    while True:
        try:
            if fault is not None:
                reported, fault = fault, None
                try:
                    on_crash(reported)
                finally:
                    # Its traceback would keep the crashed frames, and what they hold, alive.
                    del reported
                    if backoff is not None:
                        backoff.wait()
            run()
            return
        except BaseException as error:
            fault = error
