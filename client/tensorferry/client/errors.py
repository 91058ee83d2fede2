"""Exceptions of the client: one tree, each with its gRPC status code.

`from_rpc` converts exceptions of grpcio. All functions are pure and thread-safe.
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
# Defined by gRPC. A value that is not a number, or negative, means: do not retry.
PUSHBACK_KEY = "grpc-retry-pushback-ms"
_RETRY_INFO = "type.googleapis.com/google.rpc.RetryInfo"
# Longest plausible pause (one year), in seconds, and the longest text of milliseconds that is parsed.
_LONGEST_PAUSE = 365 * 86400.0
_MOST_DIGITS = 16


class InferenceError(Exception):
    """Failure of a call; base class of all errors of this package.

    `code` is the gRPC status code, and `message` the server's text. `request_id` is the id of the
    failed request, or "". `retry_after` is the time in seconds after which the server asks to try
    again, or None.

    >>> try:
    ...     client.metadata("letters")
    ... except InferenceError as error:
    ...     print(error.code.name)
    NOT_FOUND
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
    """INVALID_ARGUMENT: the server refused the request as malformed.

    >>> with InferenceClient("127.0.0.1:8001", check=False) as unchecked:
    ...     try:
    ...         unchecked.infer("digits", {"picture": np.zeros((1, 8, 8), np.uint8)})
    ...     except InvalidArgument as error:
    ...         print(error.message.partition(" for ")[0])
    unexpected inference input 'picture'
    """


class InvalidInput(InvalidArgument, ValueError):
    """Unusable argument; nothing was sent.

    `subject` names the argument, such as "timeout" or "input 'image' of model 'digits'".
    `expected` and `received` describe the values, and `change` says what to change.

    >>> try:
    ...     client.infer("digits", {"image": np.zeros((1, 8, 8))})
    ... except InvalidInput as error:
    ...     print(f"expected {error.expected}, received {error.received}: {error.change}")
    expected UINT8 [-1, 8, 8], received FP64 [1, 8, 8]: use array.astype(np.uint8)
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
    """DEADLINE_EXCEEDED: the answer did not arrive within the call's timeout.

    >>> try:
    ...     client.infer("digits", {"image": np.zeros((1, 8, 8), np.uint8)}, timeout=1e-9)
    ... except TimeoutError as error:
    ...     print(type(error).__name__)
    DeadlineExceeded
    """


class NotFound(InferenceError):
    """NOT_FOUND: the server has no such model, or no such version of it.

    >>> try:
    ...     client.infer("digits", {}, version="9")
    ... except NotFound:
    ...     print("no version 9")
    no version 9
    """


class PermissionDenied(InferenceError):
    """PERMISSION_DENIED: the caller is authenticated, but lacks the role for this call."""


class Unauthenticated(InferenceError):
    """UNAUTHENTICATED: the caller's credentials are missing or wrong."""


class ResourceExhausted(InferenceError):
    """RESOURCE_EXHAUSTED: the server is overloaded, or the message too large; `retry_after` says when to retry.

    >>> with InferenceClient("127.0.0.1:8001", max_message_bytes=1024) as small:
    ...     try:
    ...         small.submit("digits", {"image": np.zeros((99, 8, 8), np.uint8)}).result()
    ...     except ResourceExhausted as error:
    ...         print(error.retry_after)
    None
    """


class FailedPrecondition(InferenceError):
    """FAILED_PRECONDITION: the server is not in the state that the call needs."""


class ClientClosed(FailedPrecondition, RuntimeError):
    """The client was closed before the call; nothing was sent.

    >>> closed = InferenceClient("127.0.0.1:8001")
    >>> closed.close()
    >>> try:
    ...     closed.is_live()
    ... except ClientClosed as error:
    ...     print(error.message)
    this InferenceClient is closed: create another one
    """


class Unimplemented(InferenceError):
    """UNIMPLEMENTED: the server does not offer this call, or its options do not allow it.

    >>> try:
    ...     client.update_trace_settings({"trace_level": "TIMESTAMPS"})
    ... except Unimplemented:
    ...     print("only the server's operator sets up traces")
    only the server's operator sets up traces
    """


class Internal(InferenceError):
    """INTERNAL: a bug of the server, or an answer that cannot be decoded or does not fit its request."""


class Unavailable(InferenceError):
    """UNAVAILABLE: the server cannot be reached, is starting or stopping, or ended during the call.

    >>> with InferenceClient("127.0.0.1:1", retry=None) as other:
    ...     try:
    ...         other.server_metadata()
    ...     except Unavailable:
    ...         print("no server there")
    no server there
    """


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
    """Return an error of the class for this code, InferenceError if it has none."""
    return _CLASSES.get(code, InferenceError)(code, message, request_id, retry_after)


def from_rpc(error: grpc.RpcError, request_id: str = "") -> InferenceError:
    """Convert an exception of grpcio, synchronous or asyncio."""
    call = cast(grpc.Call, error)
    return from_status(call.code(), call.details(), call.trailing_metadata(), request_id)


def from_status(
    code: grpc.StatusCode, details: str | None, trailers: Any, request_id: str = ""
) -> InferenceError:
    """Return the error for the final status of a call; `trailers` is its trailing metadata."""
    return of_code(code, details or "", request_id, _retry_after(by_key(trailers)))


def by_key(trailers: Any) -> dict[str, str | bytes]:
    """Return the trailing metadata of a call, which is None without any, by key."""
    # As pairs, because `dict` cannot take the asyncio metadata of older grpcio versions.
    return dict(list(trailers or ()))


def closed_during_call(request_id: str = "") -> InferenceError:
    """Return the error for a call that was in flight during `close`."""
    text = "the client was closed before the answer arrived"
    return Cancelled(grpc.StatusCode.CANCELLED, text, request_id)


def _retry_after(trailers: dict[str, str | bytes]) -> float | None:
    details = trailers.get(_DETAILS_KEY)
    if isinstance(details, bytes):
        try:
            pause = plausible_pause(_retry_info(details))
        except DecodeError:
            # These bytes are no google.rpc.Status. The error is still reported, without a retry time.
            pause = None
        if pause is not None:
            return pause
    for key in (PUSHBACK_KEY, _RETRY_AFTER_KEY):
        milliseconds = trailers.get(key)
        if isinstance(milliseconds, str) and milliseconds.isdecimal() and len(milliseconds) < _MOST_DIGITS:
            return plausible_pause(int(milliseconds) / 1000)
    return None


def plausible_pause(seconds: float | None) -> float | None:
    """Return the pause that a server asks for, in seconds; None if it is negative or absurdly long."""
    return seconds if seconds is not None and 0 <= seconds <= _LONGEST_PAUSE else None


def _retry_info(details: bytes) -> float | None:
    for packed in _submessages(details, 3):  # google.rpc.Status.details
        detail = any_pb2.Any.FromString(packed)
        if detail.type_url == _RETRY_INFO:
            for delay in _submessages(detail.value, 1):  # google.rpc.RetryInfo.retry_delay
                return duration_pb2.Duration.FromString(delay).ToNanoseconds() / 1e9
    return None


def _submessages(data: bytes, number: int) -> list[bytes]:
    # The protobuf package lacks the messages of google.rpc. Parsed as Empty, all their fields
    # are unknown fields, which protobuf returns by number.
    fields: Any = unknown_fields.UnknownFieldSet(empty_pb2.Empty.FromString(data))
    return [field.data for field in fields if field.field_number == number and field.wire_type == 2]
