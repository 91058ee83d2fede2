"""A bounded queue and the thread that writes what is in it, for logs that must never delay a request."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from tensorferry.batcher.supervision import RestartBackoff, supervise

T = TypeVar("T")


class BackgroundWriter(Generic[T]):
    """Hands items in order to `write`, many at a time, on a thread of its own. Thread-safe.

    `put` never waits: it refuses an item while `most` items or `most_bytes` are waiting. An exception that `write`
    raises goes to `failed`, and the items of that call are lost.
    """

    def __init__(
        self,
        name: str,
        write: Callable[[Sequence[T]], None],
        failed: Callable[[BaseException], None],
        *,
        most: int,
        most_bytes: float = math.inf,
        backoff: RestartBackoff | None = None,
    ) -> None:
        self._write = write
        self._failed = failed
        self._most = most
        self._most_bytes = most_bytes
        self._backoff = backoff or RestartBackoff()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        # Guards the fields below. Nothing is written or called while it is held. Notified when there are items, when
        # all are written, and at the end. Reentrant, since a destructor may log while its thread is in here.
        self._changed = threading.Condition(threading.RLock())
        self._waiting: deque[T] = deque()
        self._bytes = 0
        self._writing = False
        self._stopping = False

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def put(self, item: T, size: int = 0) -> bool:
        """Whether the item, of `size` bytes, will be written; false if too much is waiting, and after `stop`."""
        with self._changed:
            if (
                self._stopping
                or len(self._waiting) >= self._most
                or (self._waiting and self._bytes + size > self._most_bytes)
            ):
                return False
            self._waiting.append(item)
            self._bytes += size
            if not self._writing:
                self._changed.notify_all()
        return True

    def flush(self, timeout: float) -> bool:
        """Whether all items are written, after waiting for it for at most `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._writing, timeout)

    def stop(self, timeout: float) -> bool:
        """Whether all items are written and the thread has ended, after at most `timeout` seconds. Idempotent."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._backoff.end()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        supervise(self._write_until_stopped, self._failed, self._backoff)

    def _write_until_stopped(self) -> None:
        while True:
            with self._changed:
                self._writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting or self._stopping)
                if not self._waiting:
                    return
                self._writing = True
                items, self._waiting = self._waiting, deque()
                self._bytes = 0
            self._write(items)
