"""When a call is sent again.

gRPC's core sends a call again by itself only where the server has not seen it. Everything else is decided here, since
core cannot tell a call that may have ended its server from one that a server answered with UNAVAILABLE.
"""

from __future__ import annotations

import enum
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tensorferry.client.errors import InferenceError, InvalidInput, ResourceExhausted, Unavailable
from tensorferry.client.messages.arguments import integer, shown
from tensorferry.protos import inference_pb2 as pb

# Attempts of a call that meets UNAVAILABLE, and the shortest pause in seconds where the server tells none.
_UNAVAILABLE_ATTEMPTS = 4
_PAUSE = 0.025
# A tensorferry server adds it to UNAVAILABLE. Proxies and core make that status up for a server that ended.
ANSWERED_KEY = "tensorferry-answered"
_PUSHBACK_KEY = "grpc-retry-pushback-ms"
# The beginnings of core's own messages for a call that found no connection.
_NEVER_SENT = (
    "failed to connect to all addresses",
    "connections to all backends failing",
    "DNS resolution failed",
    "errors resolving ",
    "empty address list",
)
# Parameters that begin so make a request part of a sequence, whose model keeps a state.
_SEQUENCE = "sequence_"


@dataclass(frozen=True, slots=True)
class Retry:
    """How often calls are sent again: after UNAVAILABLE, or when the server is overloaded and says when to come back.

    `attempts` is how often a request is sent at most, and after UNAVAILABLE four times at most. The client waits for
    the time that the server told, and up to as long again, twice as long with each refusal: callers that were refused
    together do not come back together. It never waits beyond the timeout of the call, but raises at once. `budget`
    bounds how many are sent again in all: each takes one of it, each answer gives back `ratio`, up to what it was; so
    in the long run a server that is in trouble meets at most `1 + ratio` times the requests.
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
NEVER = Retry(attempts=1)


def retry_of(retry: object) -> Retry:
    """What the caller gave, None for never; InvalidInput for anything else."""
    if retry is None:
        return NEVER
    if not isinstance(retry, Retry):
        raise InvalidInput(
            "retry", "a Retry, or None", shown(retry), "write Retry(attempts=3), or None for never"
        )
    return retry


def harmless(request: object) -> bool:
    """Whether a call of the client may be repeated though a server may have run it, wholly or in part.

    All calls of this client but those of a sequence: they ask, or they run a model that keeps no state.
    """
    return not isinstance(request, pb.ModelInferRequest) or not any(
        name.startswith(_SEQUENCE) for name in request.parameters
    )


class Ending(enum.Enum):
    """What is known of an attempt that met UNAVAILABLE."""

    NEVER_SENT = enum.auto()
    ANSWERED = enum.auto()
    # The server asks for no other attempt.
    FINAL = enum.auto()
    # The connection broke, or a proxy answered; the request may have run, and may have ended its server.
    UNKNOWN = enum.auto()


def ending_of(call: Any, error: InferenceError) -> Ending:
    """The ending of a call of grpcio that met this error."""
    # By pairs: older grpcio's asyncio metadata are a mapping that `dict` cannot take.
    trailers = dict(list(call.trailing_metadata() or ()))
    if error.retry_after is not None:
        return Ending.ANSWERED
    if _PUSHBACK_KEY in trailers:
        return Ending.FINAL
    if ANSWERED_KEY in trailers:
        return Ending.ANSWERED
    # Core adds no trailers of its own, so these are its words and no server's.
    if not trailers and error.message.startswith(_NEVER_SENT):
        return Ending.NEVER_SENT
    return Ending.UNKNOWN


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
        attempts = self._retry.attempts
        told = error.retry_after
        if isinstance(error, Unavailable):
            attempts = min(attempts, _UNAVAILABLE_ATTEMPTS)
            if told is None:
                told = _PAUSE * (1 << (attempt - 1))
        elif not isinstance(error, ResourceExhausted):
            return None
        if told is None or attempt >= attempts:
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


class Attempts:
    """The attempts of one call; one thread at a time uses it."""

    def __init__(self, retries: Retries, request: object) -> None:
        self._retries = retries
        self._repeatable = harmless(request)
        self._inference = isinstance(request, pb.ModelInferRequest)
        self._made = 1

    def delay(self, error: InferenceError, call: Any, left: float | None) -> float | None:
        """After how many seconds the request is sent again; None when it is not.

        `call` is the last attempt, as grpcio has it; None for a refusal in a stream.
        """
        if isinstance(error, Unavailable) and call is not None:
            ending = ending_of(call, error)
            if ending is Ending.FINAL or (ending is Ending.UNKNOWN and not self._repeatable):
                return None
            if ending is Ending.UNKNOWN:
                # At most one attempt more: each may end a server.
                self._repeatable = False
        delay = self._retries.delay(error, self._made, left)
        self._made += 1
        return delay

    def answered(self) -> None:
        """The request was answered; only answers of inference fill the budget, not those of a health check."""
        if self._inference:
            self._retries.answered()
