"""Timeouts: what callers may give, and one timeout over several calls."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from numbers import Real

from tensorferry.client.errors import InvalidInput
from tensorferry.client.messages.arguments import shown

# About 31 years. gRPC cannot encode much longer timeouts, so these count as no limit.
_LONGEST_SECONDS = 1e9


def seconds_of(timeout: object) -> float | None:
    """Return a timeout in seconds, None for no limit; raise InvalidInput for anything else."""
    if timeout is None:
        return None
    seconds = 0.0
    if isinstance(timeout, Real) and not isinstance(timeout, bool):
        try:
            seconds = float(timeout)
        except OverflowError:  # an int larger than any float
            seconds = math.inf if timeout > 0 else 0.0  # type: ignore[operator]
    if not seconds > 0:
        raise InvalidInput(
            "timeout",
            "a positive number of seconds",
            shown(timeout),
            "give seconds above 0, or None (or infinity) for no limit",
        )
    return seconds if seconds < _LONGEST_SECONDS else None


@dataclass(frozen=True, slots=True)
class Deadline:
    """Time on the monotonic clock, in seconds; None means never. Thread-safe."""

    at: float | None

    @classmethod
    def after(cls, timeout: float | None) -> Deadline:
        """Return the deadline `timeout` seconds from now; raise InvalidInput if it is no timeout."""
        seconds = seconds_of(timeout)
        return cls(None if seconds is None else time.monotonic() + seconds)

    def left(self) -> float | None:
        """Return the remaining seconds; None without a deadline."""
        return None if self.at is None else max(0.0, self.at - time.monotonic())
