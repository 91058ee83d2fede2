"""When a request that an overloaded server refused is sent again.

gRPC itself sends a call again that met UNAVAILABLE (see `channel`). A call that met RESOURCE_EXHAUSTED it does not:
whether that passes, and when, only the server knows. Where the server says when to come back, this package does.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass

from tensorferry.client.errors import InferenceError, ResourceExhausted


@dataclass(frozen=True, slots=True)
class Retry:
    """How requests are sent again that an overloaded server refused, with a time to come back.

    `attempts` is how often a request is sent at most. The client waits for the time that it was told, and up
    to as long again, twice as long with each refusal: callers that were refused together do not come back
    together. It never waits beyond the timeout of the call, but raises at once. `budget` bounds how many are sent again
    in all: each takes one of it, each answer gives back `ratio`, up to what it was; so in the long run a server
    that is in trouble meets at most `1 + ratio` times the requests.
    """

    attempts: int = 5
    budget: float = 100.0
    ratio: float = 0.1

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError(f"attempts is {self.attempts}; it must be at least 1, which never sends again")
        for name in ("budget", "ratio"):
            value = getattr(self, name)
            if not value >= 0:
                raise ValueError(f"{name} is {value!r}; it must be at least 0")


DEFAULT_RETRY = Retry()
NEVER = Retry(attempts=1)


class Retries:
    """The retries of one client. Thread-safe."""

    def __init__(self, retry: Retry, chance: Callable[[], float] = random.random) -> None:
        self._retry = retry
        self._chance = chance
        # Guards _left.
        self._lock = threading.Lock()
        self._left = retry.budget

    @property
    def possible(self) -> bool:
        """Whether anything is ever sent again."""
        return self._retry.attempts > 1

    def answered(self) -> None:
        """A request was answered."""
        # What is full stays full: then nothing need be guarded.
        if self._left < self._retry.budget:
            with self._lock:
                self._left = min(self._retry.budget, self._left + self._retry.ratio)

    def delay(self, error: InferenceError, attempt: int, left: float | None) -> float | None:
        """After how many seconds a request is sent again; None when it is not.

        It met `error` when it was sent for the `attempt`th time, from 1, and has `left` seconds (None: no end).
        """
        told = error.retry_after
        if not isinstance(error, ResourceExhausted) or told is None or attempt >= self._retry.attempts:
            return None
        delay = told * (1 + self._chance() * (1 << (attempt - 1)))
        if left is not None and delay >= left:
            # Perhaps what the server asked for fits.
            if told >= left:
                return None
            delay = told + self._chance() * (left - told) / 2
        with self._lock:
            if self._left < 1:
                return None
            self._left -= 1
        return delay
