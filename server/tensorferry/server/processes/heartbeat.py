"""A server process's answers to the supervisor's pings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

# No method that exists, so that it needs no authorization, and no line of a log tells of it.
_METHOD = "/tensorferry.Heartbeat/Ask"
# Less than the time between two pings.
_TIMEOUT_SECONDS = 8.0


class Heartbeat:
    """Calls its own process by a private socket, so that the thread which serves all calls must work for an answer.

    `alive` is called for each call that gets an answer, which is UNIMPLEMENTED. Not thread-safe.
    """

    def __init__(self, path: Path, alive: Callable[[], None]) -> None:
        # That of the process before, which was killed.
        path.unlink(missing_ok=True)
        self.socket = str(path)
        self._alive = alive
        self._call: Any = None

    def ask(self) -> Any:
        """Make a call, and return it without waiting for its answer."""
        if self._call is None:
            self._call = grpc.insecure_channel(f"unix:{self.socket}").unary_unary(_METHOD)
        call = self._call.future(b"", timeout=_TIMEOUT_SECONDS)
        call.add_done_callback(self._answered)
        return call

    def _answered(self, call: Any) -> None:
        silent = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
        if call.code() not in silent:
            self._alive()
