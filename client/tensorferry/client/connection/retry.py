"""Retry policy.

gRPC core retries only calls that no server has seen. All other retries are decided here, because
core cannot tell a call that may have crashed its server from a call that a server answered with
UNAVAILABLE.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tensorferry.client import errors
from tensorferry.client.connection.endpoints import Connection, Endpoints
from tensorferry.client.errors import InferenceError, InvalidInput, ResourceExhausted, Unavailable
from tensorferry.client.messages.arguments import integer, shown
from tensorferry.client.messages.several_answers import of_sequence, takes_several
from tensorferry.protos import inference_pb2 as pb

# Attempts of a call after UNAVAILABLE, and the shortest pause in seconds if the server names none.
_UNAVAILABLE_ATTEMPTS = 4
_PAUSE = 0.025
# Most doublings of the random part of a pause: a server may ask for pauses of 0 seconds any number of times.
_MOST_DOUBLINGS = 32
# Not that of `random`: programs with the same seed would return together.
_random = random.SystemRandom().random
# The shortest pause if a server of several processes accepts no connection.
_STARTING_PAUSE = 0.5
# Trailer of a tensorferry server with UNAVAILABLE. Proxies and gRPC core create that status
# themselves when a server has ended, without this trailer.
ANSWERED_KEY = "tensorferry-answered"
# Prefixes of core's messages for a call that found no connection.
_NEVER_SENT = (
    "failed to connect to all addresses",
    "connections to all backends failing",
    "DNS resolution failed",
    "errors resolving ",
    "empty address list",
)
_REGISTRATIONS = (pb.SystemSharedMemoryRegisterRequest, pb.CudaSharedMemoryRegisterRequest)


@dataclass(frozen=True, slots=True)
class Retry:
    """Retry options: calls are repeated after UNAVAILABLE, and after RESOURCE_EXHAUSTED with a retry time.

    `attempts` bounds how often a request is sent; after UNAVAILABLE at most four times. The client
    waits for the time that the server asked for, plus a random time of up to the same length,
    doubled with each attempt, so that refused callers do not return together. If the timeout of
    the call does not allow the wait, the error is raised at once.

    `budget` bounds the retries of a client: each retry takes 1, each answer returns `ratio`, up to
    the initial value. In the long run a failing server gets at most `1 + ratio` times the requests.

    >>> with InferenceClient("127.0.0.1:8001", retry=Retry(attempts=2)) as other:
    ...     other.is_live()
    True
    """

    attempts: int = 5
    budget: float = 100.0
    ratio: float = 0.1

    def __post_init__(self) -> None:
        integer("attempts", self.attempts, 1, 2**31 - 1)
        for name in ("budget", "ratio"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
                raise InvalidInput(
                    name, "a number of at least 0", shown(value), "give one, such as the default"
                )


DEFAULT_RETRY = Retry()


def retry_of(retry: object) -> Retry:
    """Check the caller's argument; None means no retries."""
    if retry is None:
        return Retry(attempts=1)
    if not isinstance(retry, Retry):
        raise InvalidInput(
            "retry", "a Retry, or None", shown(retry), "write Retry(attempts=3), or None for never"
        )
    return retry


def is_repeatable(request: object) -> bool:
    """Return whether a call may be repeated even if a server has run it, wholly or in part.

    False for requests of a sequence, and those with several answers. False for registrations of shared
    memory, because a second one fails with ALREADY_EXISTS. All other calls have the same effect if they
    run twice.
    """
    if not isinstance(request, pb.ModelInferRequest):
        return not isinstance(request, _REGISTRATIONS)
    return not (takes_several(request) or of_sequence(request))


class RetryBudget:
    """Retry budget of one client. Thread-safe."""

    def __init__(self, retry: Retry, chance: Callable[[], float] = _random) -> None:
        self._retry = retry
        self._chance = chance
        # Guards _left.
        self._lock = threading.Lock()
        self._left = retry.budget

    def answered(self) -> None:
        """Record an answer."""
        # A full budget stays full, so the lock is not needed.
        if self._left < self._retry.budget:
            with self._lock:
                self._left = min(self._retry.budget, self._left + self._retry.ratio)

    def delay(
        self, error: InferenceError, attempt: int, left: float | None, shortest: float = _PAUSE
    ) -> float | None:
        """Return the seconds until a request is sent again; None for no retry.

        Its attempt number `attempt`, from 1, failed with `error`. `left` is the remaining time in
        seconds, None without a deadline. `shortest` is the first pause if the server names none.
        """
        attempts = self._retry.attempts
        pause = error.retry_after
        if isinstance(error, Unavailable):
            attempts = min(attempts, _UNAVAILABLE_ATTEMPTS)
            if pause is None:
                pause = shortest * (1 << (attempt - 1))
        elif not isinstance(error, ResourceExhausted):
            return None
        if pause is None or attempt >= attempts:
            return None
        delay = pause * (1 + self._chance() * (1 << min(attempt - 1, _MOST_DOUBLINGS)))
        if left is not None and delay >= left:
            # The server's own pause may still fit.
            if pause >= left:
                return None
            delay = pause + self._chance() * (left - pause) / 2
        with self._lock:
            if self._left < 1:
                return None
            self._left -= 1
        return delay


class Attempts:
    """Attempts of one call, and the connection of each. Not thread-safe."""

    def __init__(self, retries: RetryBudget, request: object, endpoints: Endpoints) -> None:
        self._retries = retries
        self._repeatable = is_repeatable(request)
        self._inference = isinstance(request, pb.ModelInferRequest)
        self._made = 1
        self._endpoints = endpoints
        # Of the last attempt.
        self.connection: Connection | None = None

    def next(self) -> Connection:
        """Return the connection of the next attempt."""
        connection = self.connection = self._endpoints.pick(self.connection)
        return connection

    def delay(self, error: InferenceError, call: Any, left: float | None) -> float | None:
        """Return the seconds until the request is sent again; None for no retry.

        `call` is grpcio's call of the last attempt; None for a refusal inside a stream.
        """
        shortest = _PAUSE
        if (
            isinstance(error, Unavailable)
            and error.retry_after is None
            and call is not None
            and self.connection is not None
        ):
            trailers = errors.by_key(call.trailing_metadata())
            if errors.PUSHBACK_KEY in trailers:
                # The server asks for no retry.
                return None
            # A message without trailers comes from core, not from a server.
            if not trailers and error.message.startswith(_NEVER_SENT):
                if self._endpoints.failed(self.connection, sent=False) and left != 0:
                    # Not a retry, because no server has seen the request.
                    return 0.0
                if self._endpoints.of_processes:
                    # All processes of the server may be starting.
                    shortest = _STARTING_PAUSE
            elif ANSWERED_KEY not in trailers:
                # The connection broke, or a proxy answered. The request may have run, and may have crashed its server.
                self._endpoints.failed(self.connection, sent=True)
                if not self._repeatable:
                    return None
                # At most one more attempt, because each may crash a server.
                self._repeatable = False
        delay = self._retries.delay(error, self._made, left, shortest)
        self._made += 1
        return delay

    def answered(self) -> None:
        """Record an answer. Only inference refills the budget; health checks do not."""
        if self.connection is not None:
            self._endpoints.answered(self.connection)
        if self._inference:
            self._retries.answered()
