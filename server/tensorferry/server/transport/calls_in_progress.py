"""Count of the calls that are not over yet, for a server that ends."""

from __future__ import annotations

import threading
from collections.abc import Callable

import grpc


class Until:
    """Waits until a condition holds. Other threads call `changed` when it may hold. Thread-safe."""

    def __init__(self, holds: Callable[[], bool]) -> None:
        self._holds = holds
        # Guards nothing of its own; notified when `holds` may have become true.
        self._changed = threading.Condition()

    def changed(self) -> None:
        """It may hold by now."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, timeout: float) -> bool:
        """Wait until it holds; false when it does not after `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(self._holds, timeout)


class Underway:
    """Calls of the threaded transport, each from when it is taken on until its answer is sent. Thread-safe."""

    def __init__(self) -> None:
        # Guards _count; notified when it reaches 0. Nothing is called while it is held.
        self._none = threading.Condition()
        self._count = 0

    def add(self, context: grpc.ServicerContext) -> None:
        """Count this call until it is over."""
        with self._none:
            self._count += 1
        # It adds none, and returns false, if the call is over by now.
        if not context.add_callback(self._end):
            self._end()

    def _end(self) -> None:
        with self._none:
            self._count -= 1
            if not self._count:
                self._none.notify_all()

    def wait(self, timeout: float) -> bool:
        """Wait until every call is over; false when some are not after `timeout` seconds."""
        with self._none:
            return self._none.wait_for(lambda: not self._count, timeout)
