"""Requests that ended the process that ran them alone. The same inputs are refused for a while."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

# A client that sends the same inputs again within this time would end the process again.
REFUSED_SECONDS = 600.0
# The oldest are forgotten above this number.
_MOST = 1000

REFUSED = (
    "this request ended the process that ran it; the same inputs are not run again for "
    f"{REFUSED_SECONDS / 60:g} minutes after that; change the request, or report the model's crash"
)


class RefusedRequests:
    """Hashes of requests, each until a time of `clock`. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._now = clock
        # Guards writes of _until.
        self._lock = threading.Lock()
        self._until: dict[str, float] = {}

    def add(self, digest: str, until: float) -> None:
        """Refuse a request until this time."""
        with self._lock:
            self._until.pop(digest, None)
            self._until[digest] = until
            if len(self._until) > _MOST:
                del self._until[next(iter(self._until))]

    def __bool__(self) -> bool:
        """Return false if no request is refused: nearly always, so that nothing is hashed."""
        return bool(self._until)

    def has_digest(self, digest: str) -> bool:
        """Return whether the request with this hash is refused."""
        return self._until.get(digest, 0.0) > self._now()
