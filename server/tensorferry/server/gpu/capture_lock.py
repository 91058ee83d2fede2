"""Keeps the process off CUDA while a graph is captured: CUDA then lets no thread of it allocate, and ends the capture."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic


class CaptureLock:
    """Many may use the device at a time, or one capture alone. Thread-safe.

    A capture that waits keeps newcomers out, for at most `patience` seconds: if what runs has not ended by then, it
    gives up by TimeoutError.
    """

    def __init__(self, patience: float = 5.0) -> None:
        self._patience = patience
        # Guards _using and _capturing; nothing of CUDA is called while it is held.
        self._lock = threading.Lock()
        self._unused = threading.Condition(self._lock)
        self._open = threading.Condition(self._lock)
        self._using = 0
        # A capture runs, or waits until nothing else does.
        self._capturing = False

    @contextmanager
    def using(self) -> Iterator[None]:
        """While the caller runs a model, or allocates memory of the device."""
        with self._lock:
            while self._capturing:
                self._open.wait()
            self._using += 1
        try:
            yield
        finally:
            with self._lock:
                self._using -= 1
                if not self._using:
                    self._unused.notify()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """While the caller captures a graph."""
        with self._lock:
            deadline = monotonic() + self._patience
            while self._capturing:
                if not self._open.wait(deadline - monotonic()):
                    raise TimeoutError("another model was being captured all the while")
            self._capturing = True
            while self._using:
                if not self._unused.wait(deadline - monotonic()):
                    self._open_locked()
                    raise TimeoutError("other models kept the GPU busy")
        try:
            yield
        finally:
            with self._lock:
                self._open_locked()

    def _open_locked(self) -> None:
        self._capturing = False
        self._open.notify_all()


# CUDA counts by process, whatever the device.
CUDA = CaptureLock()
