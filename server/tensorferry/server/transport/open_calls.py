"""Count of open calls."""

from __future__ import annotations

import threading

import grpc


class OpenCalls:
    """Number of open calls of one kind. A stopping server waits until it is 0. Thread-safe."""

    def __init__(self) -> None:
        # Guards the fields below. Nothing is called while it is held.
        self._lock = threading.Lock()
        # Notified when _count reaches 0 while _waiting is set, because notifying costs more than counting.
        self._none_open = threading.Condition(self._lock)
        self._count = 0
        self._waiting = False

    @property
    def count(self) -> int:
        """The calls that have begun and not ended."""
        with self._lock:
            return self._count

    def begin(self, limit: int | None = None) -> bool:
        """Count a call; return false, and do not count it, if `limit` calls are open."""
        with self._lock:
            if limit is not None and self._count >= limit:
                return False
            self._count += 1
        return True

    def end(self) -> None:
        """Stop counting a call."""
        with self._lock:
            self._count -= 1
            if self._waiting and not self._count:
                self._none_open.notify_all()

    def end_with(self, context: grpc.ServicerContext) -> None:
        """Stop counting a call when its response is sent or its client has left."""
        # False if that has already happened.
        if not context.add_callback(self.end):
            self.end()

    def wait_until_none(self, timeout: float) -> bool:
        """Wait until no call is open; return false if some are after `timeout` seconds."""
        with self._lock:
            # Never reset: the server stops.
            self._waiting = True
            return self._none_open.wait_for(lambda: not self._count, timeout)
