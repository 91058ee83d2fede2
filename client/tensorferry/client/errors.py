"""What a call can fail with: one tree of exceptions that carry the gRPC status code.

`from_rpc` turns what grpcio raises into this tree; `from_stream` does it for an error that
travels inside a stream. Every function here is pure and may be called from any thread.
"""

from __future__ import annotations

from typing import Any, cast

import grpc
from google.protobuf import any_pb2, duration_pb2, empty_pb2, unknown_fields
from google.protobuf.message import DecodeError

STATUS_PARAMETER = "tensorferry_status"
RETRY_PARAMETER = "tensorferry_retry_after_ms"
_DETAILS_KEY = "grpc-status-details-bin"
_RETRY_AFTER_KEY = "retry-after-ms"
# By gRPC itself; one that is no number, or below 0, says that there is no use in coming back.
_PUSHBACK_KEY = "grpc-retry-pushback-ms"
_RETRY_INFO = "type.googleapis.com/google.rpc.RetryInfo"
# What a server may ask for in earnest: a year, in seconds; and digits of milliseconds that may say so.
_LONGEST_PAUSE = 365 * 86400.0
_MOST_DIGITS = 16


class InferenceError(Exception):
    """A call failed. The root of this package's errors.

    `code` is the gRPC status code, `message` the server's text, `request_id` the id of the
    request that failed ("" when it had none), and `retry_after` the seconds after which the
    server asks to try again (None when it did not say).
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        request_id: str = "",
        retry_after: float | None = None,
    ) -> None:
        super().__init__(code, message, request_id, retry_after)
        self.code = code
        self.message = message
        self.request_id = request_id
        self.retry_after = retry_after

    def __str__(self) -> str:
        request = f" (request {self.request_id!r})" if self.request_id else ""
        return f"{self.code.name}: {self.message}{request}"


class Cancelled(InferenceError):
    """CANCELLED: the call was cancelled, by the caller, by `close()` or by the server."""


class InvalidArgument(InferenceError):
    """INVALID_ARGUMENT: the server refused the request as malformed."""


class InvalidInput(InvalidArgument, ValueError):
    """A value that the caller gave cannot be used; nothing was sent.

    `subject` is what has the value (such as "input 'image' of model 'digits'", or "timeout"),
    `expected` and `received` say what it should be and what it is, and `change` what to do
    about it.
    """

    def __init__(self, subject: str, expected: str, received: str, change: str, request_id: str = "") -> None:
        message = f"{subject} expects {expected}, got {received}: {change}"
        super().__init__(grpc.StatusCode.INVALID_ARGUMENT, message, request_id)
        self.args = (subject, expected, received, change, request_id)
        self.subject = subject
        self.expected = expected
        self.received = received
        self.change = change

    def __str__(self) -> str:
        return f"{self.message} (request {self.request_id!r})" if self.request_id else self.message


class DeadlineExceeded(InferenceError, TimeoutError):
    """DEADLINE_EXCEEDED: the answer was not there within the call's timeout."""


class NotFound(InferenceError):
    """NOT_FOUND: the server has no such model, or no such version of it."""


class PermissionDenied(InferenceError):
    """PERMISSION_DENIED: the caller is known and may not do this."""


class Unauthenticated(InferenceError):
    """UNAUTHENTICATED: the caller's credentials are missing or wrong."""


class ResourceExhausted(InferenceError):
    """RESOURCE_EXHAUSTED: the server is overloaded; `retry_after` says when to come back."""


class FailedPrecondition(InferenceError):
    """FAILED_PRECONDITION: the server is not in the state that the call needs."""


class ClientClosed(FailedPrecondition, RuntimeError):
    """The client was closed before the call; nothing was sent."""


class Unimplemented(InferenceError):
    """UNIMPLEMENTED: the server does not offer this call."""


class Internal(InferenceError):
    """INTERNAL: a bug of the server, or an answer that cannot be decoded."""


class Unavailable(InferenceError):
    """UNAVAILABLE: the server cannot be reached, starts, stops, or ended during the call."""


_CLASSES: dict[grpc.StatusCode, type[InferenceError]] = {
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhausted,
    grpc.StatusCode.FAILED_PRECONDITION: FailedPrecondition,
    grpc.StatusCode.UNIMPLEMENTED: Unimplemented,
    grpc.StatusCode.INTERNAL: Internal,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
}


def of_code(
    code: grpc.StatusCode, message: str, request_id: str = "", retry_after: float | None = None
) -> InferenceError:
    """The error of that code, in the class that the code has (else InferenceError itself)."""
    return _CLASSES.get(code, InferenceError)(code, message, request_id, retry_after)


def from_rpc(error: grpc.RpcError, request_id: str = "") -> InferenceError:
    """The typed form of what grpcio raised for a call, synchronous or asyncio."""
    call = cast(grpc.Call, error)
    return from_status(call.code(), call.details(), call.trailing_metadata(), request_id)


def from_status(
    code: grpc.StatusCode, details: str | None, trailers: Any, request_id: str = ""
) -> InferenceError:
    """The error of a status that ended a call; `trailers` are its trailing metadata, if any."""
    # By pairs: older grpcio's asyncio metadata are a mapping that `dict` cannot take.
    return of_code(code, details or "", request_id, _retry_after(dict(list(trailers or ()))))


def from_stream(
    message: str, code_name: str, request_id: str, retry_after: float | None = None
) -> InferenceError:
    """The error that one request of a stream met; the stream itself goes on.

    `code_name` is what the server put into the parameter `tensorferry_status`; servers that
    name no code, or none that gRPC knows, give UNKNOWN.
    """
    code = grpc.StatusCode.__members__.get(code_name, grpc.StatusCode.UNKNOWN)
    return of_code(code, message, request_id, retry_after)


def client_closed() -> ClientClosed:
    """The error of a call of a client that is closed."""
    text = "this InferenceClient is closed: create another one"
    return ClientClosed(grpc.StatusCode.FAILED_PRECONDITION, text)


def closed(request_id: str = "") -> InferenceError:
    """The error of a call that was in flight when its client was closed."""
    text = "the client was closed before the answer was there"
    return Cancelled(grpc.StatusCode.CANCELLED, text, request_id)


def _retry_after(trailers: dict[str, str | bytes]) -> float | None:
    details = trailers.get(_DETAILS_KEY)
    if isinstance(details, bytes):
        try:
            pause = believed(_retry_info(details))
        except DecodeError:
            # Whatever sent it, it is not google.rpc.Status; the error itself is good all the same.
            pause = None
        if pause is not None:
            return pause
    for key in (_PUSHBACK_KEY, _RETRY_AFTER_KEY):
        milliseconds = trailers.get(key)
        if isinstance(milliseconds, str) and milliseconds.isdecimal() and len(milliseconds) < _MOST_DIGITS:
            return believed(int(milliseconds) / 1000)
    return None


def believed(seconds: float | None) -> float | None:
    """A pause that a server asks for; None for one that nobody can make, in the past or without end."""
    return seconds if seconds is not None and 0 <= seconds <= _LONGEST_PAUSE else None


def _retry_info(details: bytes) -> float | None:
    for packed in _submessages(details, 3):  # google.rpc.Status.details
        detail = any_pb2.Any.FromString(packed)
        if detail.type_url == _RETRY_INFO:
            for delay in _submessages(detail.value, 1):  # google.rpc.RetryInfo.retry_delay
                return duration_pb2.Duration.FromString(delay).ToNanoseconds() / 1e9
    return None


def _submessages(data: bytes, number: int) -> list[bytes]:
    # google.rpc's messages are not part of protobuf's own package. Parsed as Empty, every
    # field of theirs is an unknown one, which protobuf hands out by number.
    fields: Any = unknown_fields.UnknownFieldSet(empty_pb2.Empty.FromString(data))
    return [field.data for field in fields if field.field_number == number and field.wire_type == 2]
