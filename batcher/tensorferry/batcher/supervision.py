"""Supervised threads: an exception is reported and the work restarted with exponential back-off."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

from tensorferry.batcher.clock import Clock, MonotonicClock, wait_for

# Faults that are this long apart, beside the pauses, are not related.
_RECOVERED_SECONDS = 60.0


class DoublingPause:
    """Pauses after faults that may repeat: `first` seconds, then twice as long each time, up to `longest`.

    After a minute without a fault the next pause is short again. Not thread-safe.
    """

    def __init__(self, first: float, longest: float) -> None:
        self._first = first
        self._longest = longest
        self._seconds = 0.0
        self._over = -math.inf
        # The faults since the last minute without one.
        self.faults = 0

    def after(self, now: float) -> float:
        """Return how many seconds to pause after a fault that happened now."""
        recovered = now >= self._over + _RECOVERED_SECONDS
        self._seconds = self._first if recovered else min(2 * self._seconds, self._longest)
        self.faults = 1 if recovered else self.faults + 1
        self._over = now + self._seconds
        return self._seconds


class RestartBackoff:
    """Pauses before restarts: a hundredth of a second at first, up to a second. Thread-safe.

    So a fault that repeats at once takes neither a core nor the log for itself, and a single one costs little.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or MonotonicClock()
        # Notified by `end`. Guards the fields below; nothing but waiting is done while it is held.
        self._over = threading.Condition()
        self._ended = False
        self._pause = DoublingPause(0.01, 1.0)

    def wait(self) -> None:
        """Wait until the next pause is over, or `end` is called."""
        with self._over:
            now = self._clock.now()
            wait_for(self._clock, self._over, lambda: self._ended, now + self._pause.after(now))

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
