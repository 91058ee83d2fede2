"""Forwarding of signals to a callback."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from tensorferry.server.system.stop_signals import StopSignals
from tensorferry.server.system.threads import ThreadKind, new_thread


def forward_signals(on_signal: Callable[[int], None], on_hangup: Callable[[], None] | None = None) -> None:
    """Call `on_signal` on a thread with the number of each SIGTERM and SIGINT that counts as a request to stop.

    With `on_hangup`, SIGHUP calls that.
    Signals arrive through a pipe that a thread reads, because the kernel can deliver a signal to any thread: Python runs
    handlers only on the main thread, and nothing wakes the main thread for a signal that another thread received.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    for number in (signal.SIGTERM, signal.SIGINT, *([] if on_hangup is None else [signal.SIGHUP])):
        signal.signal(number, lambda received, frame: None)

    signals = StopSignals()

    def read() -> None:
        while received := os.read(reading, 1):
            if on_hangup is not None and received[0] == signal.SIGHUP:
                on_hangup()
            elif signals.counts():
                on_signal(received[0])

    new_thread("signals", read, ThreadKind.RESTARTED).start()


def ignore_signals() -> None:
    """Ignore SIGTERM and SIGINT, so that a late one cannot turn a clean exit into a death by signal."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
