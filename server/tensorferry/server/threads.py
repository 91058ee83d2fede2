"""Thread pool of the call handlers, and supervision of threads whose end stops the service."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

_log = logging.getLogger("tensorferry.server")

# Suffix of the name of grpcio's polling thread. Nothing is served without it, and grpcio never restarts it.
_POLLING_THREAD_SUFFIX = "(_serve)"

# A thread ends after this time without work, so that a burst of calls leaves no threads behind.
_IDLE_SECONDS = 10.0

_Work = tuple[Future[Any], Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class HandlerThreads(ThreadPoolExecutor):
    """Thread pool of at most `max_threads` threads; all but one end after `idle_seconds` without work. Thread-safe.

    If the system can start no more threads, the existing ones do the work. The standard pool would raise instead, in
    grpcio's polling thread, which would end all service; and it never ends an idle thread. The base class is only there
    because grpcio accepts no other executor. `changed` is called after each change of `count`, on any thread.
    """

    def __init__(
        self,
        max_threads: int,
        name: str = "grpc-handler",
        idle_seconds: float = _IDLE_SECONDS,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(max_threads, thread_name_prefix=name)
        self._max_threads, self._name, self._idle_seconds = max_threads, name, idle_seconds
        self._changed = changed
        # Guards every field below. No work is run and no thread is started while it is held.
        self._lock = threading.Lock()
        self._queued: deque[_Work] = deque()
        # The condition of each idle thread, notified for work or shutdown. The last one gets the next work, so that the others
        # can end.
        self._idle: list[threading.Condition] = []
        self._running: set[threading.Thread] = set()
        self._number = 0
        self._closed = False
        self._at_system_limit = False
        # Starts the first thread.
        self.submit(int)

    @property
    def count(self) -> int:
        """The number of threads."""
        with self._lock:
            return len(self._running)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a function on a thread. RuntimeError after `shutdown`, or if not even one thread can be started."""
        future: Future[Any] = Future()
        thread = None
        with self._lock:
            if self._closed:
                raise RuntimeError("the threads are shut down")
            self._queued.append((future, fn, args, kwargs))
            if self._idle:
                self._idle.pop().notify()
            elif len(self._running) < self._max_threads:
                self._number += 1
                thread = threading.Thread(target=self._work, name=f"{self._name}_{self._number}", daemon=True)
                self._running.add(thread)
        if thread is not None:
            self._start(thread)
            self._changed()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more work; threads end when the queue is empty, or with `cancel_futures` at once. Idempotent."""
        with self._lock:
            self._closed = True
            cancelled = list(self._queued) if cancel_futures else []
            if cancel_futures:
                self._queued.clear()
            while self._idle:
                self._idle.pop().notify()
            threads = list(self._running)
        for future, *_ in cancelled:
            future.cancel()
        if wait:
            for thread in threads:
                thread.join()

    def _start(self, thread: threading.Thread) -> None:
        try:
            thread.start()
        except RuntimeError as error:
            with self._lock:
                self._running.discard(thread)
                running = len(self._running)
                logged, self._at_system_limit = self._at_system_limit, True
            if not running:
                self._changed()
                raise
            if not logged:
                _log.error("no more threads for calls: %s; calls wait for one of %d threads", error, running)
        else:
            with self._lock:
                self._at_system_limit = False

    def _work(self) -> None:
        while (work := self._next()) is not None:
            future, fn, args, kwargs = work
            if future.set_running_or_notify_cancel():
                try:
                    result = fn(*args, **kwargs)
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)
                    del result
            # Dropped, because an idle thread must not keep the objects of the last call alive.
            del work, future, fn, args, kwargs
        self._changed()

    def _next(self) -> _Work | None:
        """Wait for work and return it; None if the thread must end."""
        with self._lock:
            wake = threading.Condition(self._lock)
            while not self._queued:
                if self._closed:
                    break
                self._idle.append(wake)
                if not wake.wait(self._idle_seconds) and wake in self._idle:
                    self._idle.remove(wake)
                    if len(self._running) > 1:
                        break
            else:
                return self._queued.popleft()
            self._running.discard(threading.current_thread())
            return None


def watch_threads(on_loss: Callable[[str], None]) -> None:
    """Log every thread that ends by an exception from now on; call `on_loss` with the reason if it is grpcio's."""

    def thread_crashed(arguments: threading.ExceptHookArgs) -> None:
        name = arguments.thread.name if arguments.thread is not None else "of unknown name"
        error = arguments.exc_value or arguments.exc_type()
        _log.critical("the thread %s ended unexpectedly; this is a bug", name, exc_info=error)
        if name.endswith(_POLLING_THREAD_SUFFIX):
            on_loss("the thread that serves every call has ended unexpectedly")

    threading.excepthook = thread_crashed
