"""Threads that must not end: those of the handlers where no more can be started, and what is vital anyhow."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

_log = logging.getLogger("tensorferry.server")

# What ends the name of the thread on which grpcio polls. Nothing is served without it, and grpcio starts it once.
_POLLING = "(_serve)"

# A thread that was idle for so long ends: a burst of calls leaves none behind.
_IDLE_SECONDS = 10.0

_Work = tuple[Future[Any], Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class HandlerThreads(ThreadPoolExecutor):
    """Threads started as calls need them, up to `most`; all but one end once they are idle for `idle_seconds`.

    Where the system gives no more threads, those that exist serve. The library's pool would raise then, out of grpcio's
    polling thread, which ends by that, and with it all service; and it keeps each thread for ever. grpcio takes no
    executor of another class, hence the base class; nothing of it is used. Thread-safe.
    """

    def __init__(self, most: int, name: str = "grpc-handler", idle_seconds: float = _IDLE_SECONDS) -> None:
        super().__init__(most, thread_name_prefix=name)
        self._most, self._name, self._idle_seconds = most, name, idle_seconds
        # Guards every field below. Nothing is run or started while it is held.
        self._lock = threading.Lock()
        self._queued: deque[_Work] = deque()
        # What each idle thread waits for: work, or the end. The last one gets the next work, so the others can end.
        self._idle: list[threading.Condition] = []
        self._running: set[threading.Thread] = set()
        self._number = 0
        self._closed = False
        self._short = False
        # One is there from the start.
        self.submit(int)

    @property
    def count(self) -> int:
        """How many there are."""
        with self._lock:
            return len(self._running)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Has a thread call this. RuntimeError after `shutdown`, or where not even one thread can be started."""
        future: Future[Any] = Future()
        thread = None
        with self._lock:
            if self._closed:
                raise RuntimeError("the threads are shut down")
            self._queued.append((future, fn, args, kwargs))
            if self._idle:
                self._idle.pop().notify()
            elif len(self._running) < self._most:
                self._number += 1
                thread = threading.Thread(target=self._work, name=f"{self._name}_{self._number}", daemon=True)
                self._running.add(thread)
        if thread is not None:
            self._start(thread)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Takes no more work; threads end when what is queued is done, or at once with `cancel_futures`. Idempotent."""
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
                left = len(self._running)
                told, self._short = self._short, True
            if not left:
                raise
            if not told:
                _log.error("no more threads for calls: %s; they wait for one of %d", error, left)
        else:
            with self._lock:
                self._short = False

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
            # An idle thread must not keep what the last call was about.
            del work, future, fn, args, kwargs

    def _next(self) -> _Work | None:
        """What to do next; None when the thread is to end."""
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


def watch_threads(lost: Callable[[str], None]) -> None:
    """From now on a thread of the process that ends by an exception is logged; `lost` is told of a vital one."""

    def ended(arguments: threading.ExceptHookArgs) -> None:
        name = arguments.thread.name if arguments.thread is not None else "of unknown name"
        fault = arguments.exc_value or arguments.exc_type()
        _log.critical("the thread %s ended unexpectedly; this is a bug", name, exc_info=fault)
        if name.endswith(_POLLING):
            lost("the thread that serves every call has ended unexpectedly")

    threading.excepthook = ended
