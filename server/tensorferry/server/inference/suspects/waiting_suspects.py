"""Suspects that wait until they may run alone: they were beside a request that ended a process, and most are harmless."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from tensorferry.batcher import Cancelled, DeadlineExceeded
from tensorferry.server.errors import NotReadyError
from tensorferry.server.inference.reply import SHUTTING_DOWN, InferenceCall, LaterCall
from tensorferry.server.processes.suspect_requests import TrialLock
from tensorferry.server.runtime.recovery.watchdog import Watchdog
from tensorferry.server.system.threads import ThreadKind, new_thread

# More are refused, and may be sent again.
_MOST = 256


class WaitingCall(LaterCall):
    """A suspect that waits; then the call that runs it. Thread-safe.

    `run` submits it, `fail` answers it with an error. `leave` is called with it when it is withdrawn.
    """

    __slots__ = ("_fail", "_leave", "_run")

    def __init__(
        self,
        run: Callable[[], InferenceCall],
        fail: Callable[[Exception], None],
        leave: Callable[[WaitingCall], None],
    ) -> None:
        super().__init__()
        self._fail = fail
        self._leave = leave
        # None once it is run, or has failed. The lock guards it.
        self._run: Callable[[], InferenceCall] | None = run

    def start(self) -> None:
        """Run it, unless it has failed."""
        run = self._take()
        if run is not None:
            self.submitted(run())

    def fail(self, error: Exception) -> None:
        """Answer it with an error, unless it is run, or has failed."""
        if self._take() is not None:
            self._fail(error)

    def _take(self) -> Callable[[], InferenceCall] | None:
        with self._lock:
            run, self._run = self._run, None
        return run

    def _withdraw_by(self, withdraw: Callable[[InferenceCall], None]) -> None:
        self._leave(self)
        self.fail(Cancelled("the request was cancelled while it waited to run alone"))
        super()._withdraw_by(withdraw)


class WaitingSuspects:
    """Waiting suspects, each of which a thread runs once `trial` is free, in their order. Thread-safe.

    The watchdog of `watch_deadlines` fails those that wait until their deadlines, and runs those that are suspect no more.
    """

    def __init__(self, trial: TrialLock) -> None:
        self._trial = trial
        self._watchdog: Watchdog | None = None
        # Guards the fields below. Nothing is called while it is held.
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        # With their deadlines, and the times until which they are suspect.
        self._waiting: OrderedDict[WaitingCall, tuple[float, float]] = OrderedDict()
        self._closed = False
        self._started = False

    def watch_deadlines(self, watchdog: Watchdog) -> None:
        """Set the watchdog. Call this before `put`."""
        self._watchdog = watchdog

    def put(
        self,
        run: Callable[[], InferenceCall],
        fail: Callable[[Exception], None],
        deadline: float,
        suspect_until: float,
    ) -> WaitingCall | None:
        """Let a suspect wait until `deadline`. None if too many wait, or after `close`. Times are those of time.monotonic."""
        call = WaitingCall(run, fail, self._leave)
        with self._lock:
            if self._closed or len(self._waiting) >= _MOST:
                return None
            self._waiting[call] = deadline, suspect_until
            self._arrived.notify()
            starts, self._started = not self._started, True
        if starts:
            new_thread("suspects", self._serve, ThreadKind.RESTARTED).start()
        if self._watchdog is not None:
            self._watchdog.watch(self)
        return call

    def _leave(self, call: WaitingCall) -> None:
        with self._lock:
            self._waiting.pop(call, None)

    def check(self, now: float) -> float | None:
        """Fail those whose deadlines have passed, and run those that are suspect no more. See `Watched`."""
        with self._lock:
            due = {call: times for call, times in self._waiting.items() if min(times) <= now}
            for call in due:
                del self._waiting[call]
            next_check = min([min(times) for times in self._waiting.values()], default=None)
        for call, (deadline, _) in due.items():
            if deadline <= now:
                call.fail(DeadlineExceeded("the deadline passed while the request waited to run alone"))
            else:
                call.start()
        return next_check

    def close(self) -> None:
        """Fail all that wait, with NotReadyError."""
        with self._lock:
            self._closed = True
            waiting, self._waiting = self._waiting, OrderedDict()
        for call in waiting:
            call.fail(NotReadyError(SHUTTING_DOWN))

    def _serve(self) -> None:
        while True:
            with self._lock:
                self._arrived.wait_for(lambda: self._waiting)
            self._trial.await_free()
            with self._lock:
                call = self._waiting.popitem(last=False)[0] if self._waiting else None
            if call is not None:
                call.start()
