"""Suspects that wait until they may run alone: they were beside a request that ended a process, and most are harmless."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from tensorferry.batcher import Cancelled
from tensorferry.server.errors import NotReadyError
from tensorferry.server.inference.interface import SHUTTING_DOWN
from tensorferry.server.inference.reply import InferenceCall
from tensorferry.server.processes.suspect_requests import TrialLock
from tensorferry.server.system.threads import ThreadKind, new_thread

# More are refused, and may be sent again.
_MOST = 256


class WaitingCall(InferenceCall):
    """A suspect that waits; then the call that runs it. `run` submits it, `fail` answers it with an error. Thread-safe."""

    __slots__ = ("_call", "_cancelled", "_fail", "_lock", "_run")

    def __init__(self, run: Callable[[], InferenceCall], fail: Callable[[Exception], None]) -> None:
        self._fail = fail
        # Guards the fields below. Nothing is called while it is held.
        self._lock = threading.Lock()
        # None once it is run, or has failed.
        self._run: Callable[[], InferenceCall] | None = run
        self._call: InferenceCall | None = None
        self._cancelled = False

    def start(self) -> None:
        """Run it, unless it has failed."""
        with self._lock:
            run, self._run = self._run, None
        if run is not None:
            call = run()
            with self._lock:
                self._call = call
                cancelled = self._cancelled
            if cancelled:
                call.cancel()

    def fail(self, error: Exception) -> None:
        """Answer it with an error, unless it is run, or has failed."""
        with self._lock:
            run, self._run = self._run, None
        if run is not None:
            self._fail(error)

    def cancel(self) -> None:
        """See `InferenceCall`."""
        self.fail(Cancelled("the request was cancelled while it waited to run alone"))
        with self._lock:
            self._cancelled = True
            call = self._call
        if call is not None:
            call.cancel()

    def abandon(self) -> None:
        """See `InferenceCall`."""
        self.cancel()
        with self._lock:
            call = self._call
        if call is not None:
            call.abandon()


class WaitingSuspects:
    """Waiting suspects, each of which a thread runs once `trial` is free, in their order. Thread-safe."""

    def __init__(self, trial: TrialLock) -> None:
        self._trial = trial
        # Guards the fields below. Nothing is called while it is held.
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        self._waiting: deque[WaitingCall] = deque()
        self._closed = False
        self._started = False

    def put(self, run: Callable[[], InferenceCall], fail: Callable[[Exception], None]) -> WaitingCall | None:
        """Let a suspect wait. None if too many do, or after `close`."""
        call = WaitingCall(run, fail)
        with self._lock:
            if self._closed or len(self._waiting) >= _MOST:
                return None
            self._waiting.append(call)
            self._arrived.notify()
            starts, self._started = not self._started, True
        if starts:
            new_thread("suspects", self._serve, ThreadKind.RESTARTED).start()
        return call

    def close(self) -> None:
        """Fail all that wait, with NotReadyError."""
        with self._lock:
            self._closed = True
            waiting, self._waiting = self._waiting, deque()
        for call in waiting:
            call.fail(NotReadyError(SHUTTING_DOWN))

    def _serve(self) -> None:
        while True:
            with self._lock:
                self._arrived.wait_for(lambda: self._waiting)
            self._trial.await_free()
            with self._lock:
                call = self._waiting.popleft() if self._waiting else None
            if call is not None:
                call.start()
