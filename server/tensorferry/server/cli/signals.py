"""Forwarding of SIGTERM and SIGINT to a callback."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable

from tensorferry.batcher.supervision import RestartBackoff, supervise

_log = logging.getLogger("tensorferry.server")


def forward_signals(on_signal: Callable[[int], None]) -> None:
    """Call `on_signal` on a thread with the number of each SIGTERM and SIGINT that the process receives.

    Signals arrive through a pipe that a thread reads, because the kernel can deliver a signal to any thread: Python runs
    handlers only on the main thread, and nothing wakes the main thread for a signal that another thread received.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, frame: None)

    def read() -> None:
        while received := os.read(reading, 1):
            on_signal(received[0])

    def run() -> None:
        supervise(
            read,
            lambda error: _log.error("the signal thread crashed (bug); it is restarted", exc_info=error),
            RestartBackoff(),
        )

    threading.Thread(target=run, name="signals", daemon=True).start()


def ignore_signals() -> None:
    """Ignore SIGTERM and SIGINT, so that a late one cannot turn a clean exit into a death by signal."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
