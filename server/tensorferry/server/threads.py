"""Threads that must not end: those of the handlers where no more can be started, and what is vital anyhow."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

_log = logging.getLogger("tensorferry.server")

# What ends the name of the thread on which grpcio polls. Nothing is served without it, and grpcio starts it once.
_POLLING = "(_serve)"


class HandlerThreads(ThreadPoolExecutor):
    """Made as calls need them, up to so many; where the system gives no more, those that are there serve.

    A pool would raise then, though one of its threads will do the work: out of grpcio's polling thread, which ends
    by that, and with it all service.
    """

    def __init__(self, most: int, name: str = "grpc-handler") -> None:
        super().__init__(most, thread_name_prefix=name)
        self._short = False
        # One is there from the start.
        self.submit(int)

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._threads)

    def _adjust_thread_count(self) -> None:
        try:
            super()._adjust_thread_count()
        except RuntimeError as error:
            if not self._threads:
                raise
            if not self._short:
                _log.error(
                    "no more threads for calls: %s; they wait for one of %d", error, len(self._threads)
                )
            self._short = True
        else:
            self._short = False


def watch_threads(lost: Callable[[str], None]) -> None:
    """From now on a thread of the process that ends by an exception is logged; `lost` is told of a vital one."""

    def ended(arguments: threading.ExceptHookArgs) -> None:
        name = arguments.thread.name if arguments.thread is not None else "of unknown name"
        fault = arguments.exc_value or arguments.exc_type()
        _log.critical("the thread %s ended unexpectedly; this is a bug", name, exc_info=fault)
        if name.endswith(_POLLING):
            lost("the thread that serves every call has ended unexpectedly")

    threading.excepthook = ended
