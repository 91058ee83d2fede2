"""One timeout over several calls."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment on the monotonic clock, in seconds; None is never. May be used from any thread."""

    at: float | None

    @classmethod
    def after(cls, timeout: float | None) -> Deadline:
        """The deadline `timeout` seconds from now."""
        return cls(None if timeout is None else time.monotonic() + timeout)

    def left(self) -> float | None:
        """The seconds that are left, the timeout of the next call; None without a deadline."""
        return None if self.at is None else max(0.0, self.at - time.monotonic())
