"""Health, told without waiting for those who hear of it.

grpcio's servicer sends each change to everybody who watches on the thread that makes it, under its lock, and each
sending waits until the thread that polls has seen it leave. Were it done so, a batch that fails on that thread, or a
watcher that leaves meanwhile, would stop the server for good, and one that does not read would keep all others, and
`Check`, from the news.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

from grpc_health.v1 import health

from tensorferry.server.threads import HandlerThreads

_log = logging.getLogger("tensorferry.server")

# Watchers that do not read have so many threads at most; only then others wait for them.
_THREADS = 16


class Health(health.HealthServicer):  # type: ignore[misc]
    """As grpcio's, but that `set` never waits, whoever calls it. Thread-safe; `close` ends its threads."""

    def __init__(self, threads: Executor | None = None) -> None:
        super().__init__(experimental_non_blocking=True)
        self._threads = threads or HandlerThreads(_THREADS, "health")

    def Watch(self, request: Any, context: Any, send_response_callback: Any = None) -> Any:  # noqa: N802
        """Tells of each change from now on."""
        if send_response_callback is not None:
            send_response_callback = _Watcher(send_response_callback, self._threads)
        return super().Watch(request, context, send_response_callback)

    def close(self) -> None:
        """Tells nobody any more."""
        self._threads.shutdown(wait=False)


class _Watcher:
    """Sends to one who watches, in order, on one thread at a time. Thread-safe."""

    def __init__(self, send: Callable[[Any], None], threads: Executor) -> None:
        self._send = send
        self._threads = threads
        # Guards the fields below. Nothing is sent while it is held.
        self._lock = threading.Lock()
        self._waiting: deque[Any] = deque()
        self._sending = False

    def __call__(self, response: Any) -> None:
        """Has a response sent soon, or with None the stream ended."""
        with self._lock:
            self._waiting.append(response)
            begins, self._sending = not self._sending, True
        if not begins:
            return
        try:
            self._threads.submit(self._send_all)
        except RuntimeError:
            # The server has stopped.
            pass

    def _send_all(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._sending = False
                    return
                response = self._waiting.popleft()
            try:
                self._send(response)
            except BaseException:
                _log.exception("a change of health could not be sent")
