"""Deferred wake-ups of batchers that get requests from the thread that answers another batcher's batch.

A batch's answers may all become requests of another batcher. If its worker woke at the first of them, it would take a batch
of one. So it is woken when the last answer is out, or when its own batch is full.
"""

from __future__ import annotations

import threading
from typing import Protocol

from tensorferry.batcher.request import Request


class Receiver(Protocol):
    """What takes the requests: a `Batcher` or a `Pipeline`."""

    def enqueue(self, request: Request, *, notify: bool = True, skip_admission: bool = False) -> bool:
        """See `Batcher.enqueue`."""

    def wake(self) -> None:
        """See `Batcher.wake`."""


class DeferredWakeups(threading.local):
    """Receivers that this thread wakes at the end of its current answers. Each thread has its own."""

    def __init__(self) -> None:
        self._depth = 0
        self._unnotified: list[Receiver] = []

    def begin(self) -> None:
        """Note that answers follow on this thread, up to the `end` that belongs to it. May be nested."""
        self._depth += 1

    def end(self) -> None:
        """Wake the receivers, unless outer answers follow."""
        self._depth -= 1
        if not self._depth and self._unnotified:
            receivers, self._unnotified = self._unnotified, []
            for receiver in receivers:
                receiver.wake()

    def enqueue(self, receiver: Receiver, request: Request, *, skip_admission: bool) -> None:
        """Enqueue a request. Raises as `Batcher.enqueue` does."""
        if not self._depth:
            receiver.enqueue(request, skip_admission=skip_admission)
        elif receiver.enqueue(request, notify=False, skip_admission=skip_admission):
            if any(other is receiver for other in self._unnotified):
                # Its batch is full.
                receiver.wake()
            else:
                self._unnotified.append(receiver)


deferred_wakeups = DeferredWakeups()
