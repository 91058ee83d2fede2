"""Background writer: a bounded queue and a thread, for logs that must never delay a request."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from tensorferry.batcher.supervision import RestartBackoff
from tensorferry.server.system.threads import ThreadKind, new_thread

T = TypeVar("T")


class BackgroundWriter(Generic[T]):
    """Thread that passes queued items to `write` in order, many at a time. Thread-safe.

    `put` never waits: it refuses an item while `max_items` or `max_bytes` are queued. An exception of `write` is logged,
    and the items of that call are lost.
    """

    def __init__(
        self,
        name: str,
        write: Callable[[Sequence[T]], None],
        *,
        max_items: int,
        max_bytes: float = math.inf,
        backoff: RestartBackoff | None = None,
    ) -> None:
        self._write = write
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._backoff = backoff or RestartBackoff()
        self._thread = new_thread(name, self._run, ThreadKind.RESTARTED, backoff=self._backoff)
        # Guards the fields below. Nothing is written or called while it is held. Notified when there are items, when
        # all are written, and at the end. Reentrant, because a destructor may log while its thread holds the lock.
        self._changed = threading.Condition(threading.RLock())
        self._queued: deque[T] = deque()
        self._bytes = 0
        self._writing = False
        self._stopping = False

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, item: T, size: int = 0) -> bool:
        """Queue an item of `size` bytes. Return False if the queue is full, or after `stop`."""
        with self._changed:
            if (
                self._stopping
                or len(self._queued) >= self._max_items
                or (self._queued and self._bytes + size > self._max_bytes)
            ):
                return False
            self._queued.append(item)
            self._bytes += size
            if not self._writing:
                self._changed.notify_all()
        return True

    def flush(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds for all items to be written. Return whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queued and not self._writing, timeout)

    def stop(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds for all items to be written and the thread to end. Idempotent."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._backoff.end()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._queued or self._stopping)
                if not self._queued:
                    return
                self._writing = True
                items, self._queued = self._queued, deque()
                self._bytes = 0
            self._write(items)
