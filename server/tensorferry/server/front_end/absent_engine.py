"""What takes requests while there is no engine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from tensorferry.server.front_end.engine_connection import no_engine_error
from tensorferry.server.front_end.remote_call import HeldRequest, HeldRequests, RemoteCall

# Requests of one burst come within this time after the first of them has ended the engine. They shall all be answered.
HOLD_SECONDS = 1.0
# As many as a link has.
_MOST_HELD = 4096


class AbsentEngine:
    """Holds requests in `waiting` until a time of `clock`, and refuses later ones. Thread-safe.

    It stands in for `EngineConnection`. `expected` says whether an engine comes soon.
    """

    def __init__(
        self,
        waiting: HeldRequests,
        until: float = -math.inf,
        *,
        expected: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._waiting = waiting
        self._until = until
        self._now = clock
        self.expected = expected

    def submit(self, call: RemoteCall, message: bytes, deadline: float, extra: bytes) -> None:
        """Hold a request. StatusError if it is too late."""
        if self._now() >= self._until or len(self._waiting) >= _MOST_HELD:
            raise no_engine_error()
        self._waiting.hold([HeldRequest(call, message, deadline, extra)])

    def flush(self) -> None:
        """Do nothing: there is no engine to wake."""

    def run_inline(self, max_seconds: float) -> float:
        """See `flush`."""
        return math.inf
