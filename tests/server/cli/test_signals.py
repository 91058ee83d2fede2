"""A signal reaches the server on any thread that receives it, and one request to stop is one."""

from __future__ import annotations

import os
import subprocess
import sys

from support.server.rig import PATIENCE

from tensorferry.server.system.stop_signals import StopSignals

_RECEIVED_BY_ANOTHER_THREAD = f"""
import os, queue, signal, threading
from tensorferry.server.cli.signals import forward_signals

received = queue.SimpleQueue()
forward_signals(received.put, lambda: received.put("hangup"))

def receive():
    # The kernel can deliver a signal to any thread; this one is not the main thread, which is blocked.
    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.pthread_kill(threading.get_ident(), number)
    threading.Event().wait()

threading.Timer(0.2, receive).start()
print(received.get(timeout={PATIENCE}), received.get(timeout={PATIENCE}), flush=True)
os._exit(0)
"""


def test_signals_that_another_thread_receives_are_forwarded() -> None:
    """Their Python handlers would run only when the main thread wakes, and nothing wakes it."""
    process = subprocess.run(
        [sys.executable, "-c", _RECEIVED_BY_ANOTHER_THREAD],
        capture_output=True,
        text=True,
        env=os.environ,
        timeout=2 * PATIENCE,
    )
    assert process.stdout == "hangup 15\n", process.stderr


def test_signals_within_a_second_of_the_first_are_one() -> None:
    times = iter([100.0, 100.0, 100.9, 101.0, 101.1, 101.2])
    signals = StopSignals(lambda: next(times))
    assert [signals.counts() for _ in range(6)] == [True, False, False, False, True, True]
