"""Outcome of a message for each of its calls: the error of all, or an attempt alone. Pure and thread-safe."""

from __future__ import annotations

from typing import Any

import grpc

from tensorferry.client import errors

# Statuses that do not depend on the rows of a message, so that each of its calls would get them, too.
_SHARED = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)
# A call with less time left gets the deadline error of its message, in seconds.
_LEAST_SECONDS = 0.005


class CallFailure(grpc.RpcError):
    """Status of one call of a message, with the methods of grpcio's errors."""

    def __init__(self, code: grpc.StatusCode, details: str, trailers: Any = ()) -> None:
        super().__init__(code, details)
        self._code = code
        self._details = details
        self._trailers = trailers

    def code(self) -> grpc.StatusCode:
        """Return the status code."""
        return self._code

    def details(self) -> str:
        """Return the server's text."""
        return self._details

    def trailing_metadata(self) -> Any:
        """Return the trailing metadata."""
        return self._trailers


def is_shared(error: Any) -> bool:
    """Return whether each call of a failed message gets its error. If not, each call is repeated alone.

    `error` is grpcio's error or finished call. An error is not shared if the rows of one call may
    be the reason, or the size of the message. After overload, the retry policy decides for each call.
    """
    code = error.code()
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        # Without a retry time the message is too large, which its calls may not be.
        return errors.from_status(code, "", error.trailing_metadata()).retry_after is not None
    return code in _SHARED


def copy_of(error: Any) -> CallFailure:
    """Return the error for one call. Each call raises an exception of its own, with its own traceback."""
    return CallFailure(error.code(), error.details() or "", error.trailing_metadata())


def is_too_late(deadline: float | None, now: float) -> bool:
    """Return whether a call has no time left for an attempt alone."""
    return deadline is not None and deadline - now < _LEAST_SECONDS


def deadline_passed() -> CallFailure:
    """Return the failure of a call whose deadline passed before its message was answered."""
    return CallFailure(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")


def client_closed() -> CallFailure:
    """Return the failure of a call of a closed client."""
    closed = errors.closed_during_call()
    return CallFailure(closed.code, closed.message)
