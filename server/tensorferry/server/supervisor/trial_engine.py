"""An engine in which front-ends run, one by one, requests that may have ended the real engine."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from tensorferry.server.supervisor.supervised_process import SupervisedProcess

_log = logging.getLogger("tensorferry.server")

# Time for the engine to end after its last trial.
_END_SECONDS = 5.0
# The oldest refused requests are forgotten above this number.
_MOST_REFUSED = 1000


class TrialEngine:
    """Starts an engine when a front-end has suspects, and gives it to one front-end after the other. Not thread-safe.

    `start` starts the child of a process. `connect` gives a front-end a link to it. After each event of the supervisor
    `settle` does what follows.
    """

    def __init__(
        self,
        process: SupervisedProcess,
        start: Callable[[SupervisedProcess], None],
        connect: Callable[[SupervisedProcess], None],
    ) -> None:
        self.process = process
        self._start = start
        self._connect = connect
        # Front-ends with suspects, in the order in which they asked.
        self._asking: list[SupervisedProcess] = []
        # The front-end that has the engine.
        self._user: SupervisedProcess | None = None
        self._loaded = self._ending = False
        # Requests that ended an engine: the messages that tell front-ends to refuse them.
        self._refused: deque[dict[str, Any]] = deque(maxlen=_MOST_REFUSED)

    def on_count(self, front_end: SupervisedProcess, count: int) -> None:
        """Note how many suspects a front-end has."""
        if count and front_end not in self._asking:
            self._asking.append(front_end)
        elif not count:
            self.forget(front_end)

    def forget(self, front_end: SupervisedProcess) -> None:
        """Note that a front-end has no suspects any more, or has ended."""
        if front_end in self._asking:
            self._asking.remove(front_end)
        if self._user is front_end:
            self._leave(died=False)

    def on_loaded(self) -> None:
        """Note that the engine has loaded its models."""
        self._loaded = True
        self._tell(self._user, "trial_ready", {})

    def on_end(self) -> None:
        """Note that the engine has ended, or could not be started. A front-end that has suspects left asks again."""
        if self._user is None and self._asking and not self._ending:
            self._user = self._asking[0]
        if self._user is not None:
            self._asking.remove(self._user)
            self._leave(died=True)
        self._loaded = self._ending = False

    def settle(self, now: float, *, may_start: bool) -> None:
        """Start the engine, give it to the next front-end, or end it."""
        if self.process.child is None and self._asking and may_start:
            _log.warning("an engine is started to find the request that ended the last one")
            self._start(self.process)
        child = self.process.child
        if child is None:
            return
        if not self._asking and not self._ending:
            self._ending = True
            child.send("stop", {})
            self.process.kill_after(_END_SECONDS, now)
        elif self._asking and self._user is None and not self._ending:
            self._user = self._asking[0]
            self._connect(self._user)
            if self._loaded:
                self._tell(self._user, "trial_ready", {})

    def on_refuse(
        self, sender: SupervisedProcess, fields: dict[str, Any], others: list[SupervisedProcess]
    ) -> None:
        """Tell the other front-ends to refuse a request."""
        self._refused.append(fields)
        for front_end in others:
            if front_end is not sender:
                self._tell(front_end, "refuse", fields)

    def send_refused(self, front_end: SupervisedProcess) -> None:
        """Tell a new front-end which requests to refuse."""
        for fields in self._refused:
            self._tell(front_end, "refuse", fields)

    def _leave(self, *, died: bool) -> None:
        user, self._user = self._user, None
        self._tell(user, "trial_over", {"died": died})

    @staticmethod
    def _tell(front_end: SupervisedProcess | None, kind: str, fields: dict[str, Any]) -> None:
        if front_end is not None and front_end.child is not None:
            front_end.child.send(kind, fields)
