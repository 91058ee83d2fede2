"""Threads of a server process, with what follows an exception that escapes from one, and the thread pool of calls."""

from __future__ import annotations

import enum
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from tensorferry.batcher.supervision import RestartBackoff, supervise

_log = logging.getLogger("tensorferry.server")

# A thread ends after this time without work, so that a burst of calls leaves no threads behind.
_IDLE_SECONDS = 10.0

_Work = tuple[Future[Any], Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class ThreadKind(enum.Enum):
    """What follows an exception that escapes from the work of a thread."""

    # The work begins again after a short pause.
    RESTARTED = enum.auto()
    # The process exits with status 1, because requests are not served without the thread.
    ESSENTIAL = enum.auto()
    # Requests are served without it. Threads that a library or a function has started are of this kind.
    EXPENDABLE = enum.auto()


# The kinds of the threads that live. Each operation is atomic.
_kinds: WeakKeyDictionary[threading.Thread, ThreadKind] = WeakKeyDictionary()


def new_thread(
    name: str, run: Callable[[], None], kind: ThreadKind, *, backoff: RestartBackoff | None = None
) -> threading.Thread:
    """Return a daemon thread for `run`, which its owner starts and joins.

    `backoff` has the pauses of a restarted thread; its owner ends it before it joins the thread.
    """
    if kind is ThreadKind.RESTARTED:
        run = partial(supervise, run, partial(_log_restart, name), backoff or RestartBackoff())
    thread = threading.Thread(target=run, name=name, daemon=True)
    _kinds[thread] = kind
    return thread


@contextmanager
def essential_threads() -> Iterator[None]:
    """Make every thread that a library starts within the block ESSENTIAL."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        _kinds.setdefault(thread, ThreadKind.ESSENTIAL)


def watch_threads(before_exit: Callable[[], object]) -> None:
    """Apply the rule of `ThreadKind` to every thread of this process; the main thread is ESSENTIAL.

    `before_exit` is called before the process exits, to write the log.
    """

    def ended(thread: threading.Thread | None, error: BaseException) -> None:
        name = "of unknown name" if thread is None else thread.name
        kind = None if thread is None else _kinds.get(thread)
        if kind is None:
            _log.error(
                "the thread %s, which the server did not start, ended by an exception; requests are served without it",
                name,
                exc_info=error,
            )
            return
        if kind is ThreadKind.EXPENDABLE:
            _log.error("the thread %s crashed (bug); requests are served without it", name, exc_info=error)
            return
        try:
            _log.critical("the thread %s crashed (bug)", name, exc_info=error)
            # The last line of the log.
            _log.critical(
                "the process exits with status 1, so that it can be started again: requests are not served without the "
                "thread %s, which ended by %s: %s",
                name,
                type(error).__name__,
                error,
            )
            before_exit()
        finally:
            # Also if there is no memory for the log.
            os._exit(1)

    _kinds[threading.main_thread()] = ThreadKind.ESSENTIAL
    threading.excepthook = lambda crash: ended(crash.thread, crash.exc_value or crash.exc_type())
    sys.excepthook = lambda kind, error, traceback: ended(threading.main_thread(), error)


def _log_restart(name: str, error: BaseException) -> None:
    _log.error("the thread %s crashed (bug); it is restarted", name, exc_info=error)


class HandlerThreads(ThreadPoolExecutor):
    """Thread pool of at most `max_threads` threads; all but one end after `idle_seconds` without work. Thread-safe.

    If the system can start no more threads, the existing ones do the work. The standard pool would raise instead, in
    grpcio's polling thread, which would end all service; and it never ends an idle thread. The base class is only there
    because grpcio accepts no other executor.
    """

    def __init__(
        self,
        max_threads: int,
        name: str = "grpc-handler",
        idle_seconds: float = _IDLE_SECONDS,
    ) -> None:
        super().__init__(max_threads, thread_name_prefix=name)
        self._max_threads, self._name, self._idle_seconds = max_threads, name, idle_seconds
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
                thread = new_thread(f"{self._name}_{self._number}", self._work, ThreadKind.RESTARTED)
                self._running.add(thread)
        if thread is not None:
            self._start(thread)
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

    def _next(self) -> _Work | None:
        """Wait for work and return it; None if the thread must end."""
        with self._lock:
            wake = threading.Condition(self._lock)
            while not self._queued:
                if self._closed:
                    break
                self._idle.append(wake)
                try:
                    wake.wait(self._idle_seconds)
                finally:
                    # Also if an exception ends the wait, because work would be left to a thread that does not wait.
                    idle = wake in self._idle
                    if idle:
                        self._idle.remove(wake)
                if idle and len(self._running) > 1:
                    break
            else:
                return self._queued.popleft()
            self._running.discard(threading.current_thread())
            return None
