"""Lock that keeps other threads off CUDA while a graph is captured.

CUDA aborts a capture when another thread of the process allocates device memory.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic


class CaptureLock:
    """Shared lock for users of the device, exclusive for a capture. Thread-safe.

    A waiting capture blocks new users. It raises TimeoutError if the current users need more than `timeout` seconds.
    """

    def __init__(self, timeout: float = 5.0) -> None:
        self._timeout = timeout
        # Guards _users and _capturing. CUDA is never called while it is held.
        self._lock = threading.Lock()
        self._unused = threading.Condition(self._lock)
        self._not_capturing = threading.Condition(self._lock)
        self._users = 0
        # True while a capture runs or waits for the users to finish.
        self._capturing = False

    @contextmanager
    def using(self) -> Iterator[None]:
        """Hold the lock shared, to run a model or to allocate device memory."""
        with self._lock:
            while self._capturing:
                self._not_capturing.wait()
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._unused.notify()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Hold the lock exclusively, to capture a graph."""
        with self._lock:
            deadline = monotonic() + self._timeout
            while self._capturing:
                if not self._not_capturing.wait(deadline - monotonic()):
                    raise TimeoutError("another model was being captured")
            self._capturing = True
            while self._users:
                if not self._unused.wait(deadline - monotonic()):
                    self._end_capture_locked()
                    raise TimeoutError("other models kept the GPU busy")
        try:
            yield
        finally:
            with self._lock:
                self._end_capture_locked()

    def _end_capture_locked(self) -> None:
        self._capturing = False
        self._not_capturing.notify_all()


# One lock for all devices, because CUDA applies the rule to the whole process.
CUDA = CaptureLock()
