"""Table of exceptions and their gRPC statuses.

The text of an exception that is not in the table never reaches a client.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import grpc

from tensorferry.batcher import (
    BatcherClosed,
    Cancelled,
    DeadlineExceeded,
    InstanceFailed,
    InvalidRequest,
    ModelRowsError,
    OutOfMemory,
    QueueFull,
    RequestTooLarge,
    RunTimedOut,
    SequenceEnded,
    Shed,
)
from tensorferry.protos.errors import TensorError
from tensorferry.protos.standard import status_pb2
from tensorferry.server.errors import (
    AlreadyExistsError,
    InvalidRequestError,
    LimitError,
    LoadFailedError,
    ModelFailedError,
    NotFoundError,
    NotReadyError,
    OneProcessError,
    PermissionDeniedError,
    SuspectError,
    UnauthenticatedError,
    UnreadResponsesError,
    UnsupportedError,
)

_log = logging.getLogger("tensorferry.server")

# For modules that need the codes and nothing else of grpc.
StatusCode = grpc.StatusCode

# gRPC drops trailing metadata of more than 8 KiB, and the status with it. The message takes up to three times its bytes
# there, because it is percent-encoded, and it occurs again, in base64, if there is a retry hint. It can quote input of the
# client.
_MAX_MESSAGE_BYTES = 1500

# The metadata key of google.rpc.Status, and the type of its details.
_DETAILS = "grpc-status-details-bin"
_RETRY_INFO = "type.googleapis.com/google.rpc.RetryInfo"

# The metadata key of the time until a retry, in milliseconds, that gRPC's own retries keep to.
PUSHBACK_KEY = "grpc-retry-pushback-ms"

# A mark for the bundled client: the server is alive, so the call can be repeated.
ANSWERED_KEY = "tensorferry-answered"
_SENT_BY_SERVER = ((ANSWERED_KEY, "1"),)

# Triton's texts for these errors. Here they are followed by details.
_FULL = "Exceeds maximum queue size: "
_EXPIRED = "Request timeout expired: "

# For a model that is batched although the first dimension of its outputs does not count rows.
_NO_ROWS = (
    "the model's outputs cannot be split into rows, so it must not be batched; start the server with --max-batch-size 0, or "
    "give the model a configuration with max_batch_size: 0, inputs and outputs: "
)


class _Mapping(NamedTuple):
    """The status of an exception class; `triton` is the code with --triton-status-codes, None if it is the same."""

    kind: type[BaseException]
    code: grpc.StatusCode
    triton: grpc.StatusCode | None = None
    prefix: str = ""


_TABLE = (
    _Mapping(InvalidRequestError, grpc.StatusCode.INVALID_ARGUMENT),
    _Mapping(TensorError, grpc.StatusCode.INVALID_ARGUMENT),
    _Mapping(InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
    _Mapping(RequestTooLarge, grpc.StatusCode.INVALID_ARGUMENT),
    _Mapping(NotFoundError, grpc.StatusCode.NOT_FOUND),
    _Mapping(AlreadyExistsError, grpc.StatusCode.ALREADY_EXISTS),
    _Mapping(LimitError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    _Mapping(UnauthenticatedError, grpc.StatusCode.UNAUTHENTICATED),
    _Mapping(PermissionDeniedError, grpc.StatusCode.PERMISSION_DENIED),
    _Mapping(NotReadyError, grpc.StatusCode.UNAVAILABLE),
    _Mapping(BatcherClosed, grpc.StatusCode.UNAVAILABLE),
    _Mapping(QueueFull, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE, _FULL),
    _Mapping(Shed, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE, _FULL),
    _Mapping(DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE, _EXPIRED),
    _Mapping(InstanceFailed, grpc.StatusCode.UNAVAILABLE),
    _Mapping(OutOfMemory, grpc.StatusCode.RESOURCE_EXHAUSTED),
    # Not UNAVAILABLE, because clients would retry: another run would probably take as long, and fail other requests too.
    _Mapping(RunTimedOut, grpc.StatusCode.DEADLINE_EXCEEDED),
    _Mapping(Cancelled, grpc.StatusCode.CANCELLED),
    _Mapping(LoadFailedError, grpc.StatusCode.FAILED_PRECONDITION),
    _Mapping(SequenceEnded, grpc.StatusCode.FAILED_PRECONDITION),
    _Mapping(OneProcessError, grpc.StatusCode.FAILED_PRECONDITION),
    _Mapping(UnsupportedError, grpc.StatusCode.UNIMPLEMENTED),
    _Mapping(ModelFailedError, grpc.StatusCode.INTERNAL),
    _Mapping(ModelRowsError, grpc.StatusCode.INTERNAL, prefix=_NO_ROWS),
)

_WITH_RETRY_HINT = (QueueFull, Shed, InstanceFailed, UnreadResponsesError, SuspectError)

# Cache of look-ups in the table, because most calls get an error under overload.
_CACHE: dict[type[BaseException], _Mapping | None] = {}


@dataclass(frozen=True, slots=True)
class Status:
    """A gRPC status with its message; `retry_after` is in seconds, None if a retry does not help."""

    code: grpc.StatusCode
    message: str
    retry_after: float | None = None


# The status of an exception that is not in the table.
INTERNAL_ERROR = Status(grpc.StatusCode.INTERNAL, "internal error; the server's log has the details")


def status_of(
    error: BaseException, *, triton: bool = False, about: Callable[[], Mapping[str, str]] = dict
) -> Status:
    """Return the status of an exception; an exception that is not in the table is logged, and is INTERNAL_ERROR.

    `triton` selects Triton's codes; `about` returns fields that describe the request, for the log.

    The exception loses its traceback: the frames hold the request and its reply, and the reply holds the exception,
    so that only the garbage collector could free them.
    """
    status = mapped_status(error, triton=triton)
    if status is None:
        status = INTERNAL_ERROR
        _log.error("unexpected error while serving a request", exc_info=error, extra=about())
    # Quoted, because it can hold input of the client.
    _log.debug("answering with %s: %r", status.code.name, status.message)
    error.__traceback__ = error.__context__ = None
    return status


def code_of(error: BaseException, *, triton: bool = False) -> grpc.StatusCode:
    """Return the code of an exception's status, for counters."""
    row = _row_of(type(error))
    return grpc.StatusCode.INTERNAL if row is None else _code(row, triton)


def mapped_status(error: BaseException, *, triton: bool = False) -> Status | None:
    """Return the status of an exception without logging; None if it is not in the table."""
    row = _row_of(type(error))
    if row is None:
        return None
    retry_after = error.retry_after if isinstance(error, _WITH_RETRY_HINT) else None
    return Status(_code(row, triton), _shortened(f"{row.prefix}{error}"), retry_after)


def _code(row: _Mapping, triton: bool) -> grpc.StatusCode:
    return row.triton if triton and row.triton is not None else row.code


def _row_of(kind: type[BaseException]) -> _Mapping | None:
    try:
        return _CACHE[kind]
    except KeyError:
        row = _CACHE[kind] = next((row for row in _TABLE if issubclass(kind, row.kind)), None)
        return row


def trailing_metadata(status: Status) -> tuple[tuple[str, str | bytes], ...]:
    """Return the retry hint, as google.rpc.RetryInfo and for gRPC's own retries, if the status has one.

    UNAVAILABLE without a hint gets a mark of this server, because a connection that breaks has the same code.
    """
    if status.retry_after is None:
        return _SENT_BY_SERVER if status.code is grpc.StatusCode.UNAVAILABLE else ()
    return _retry_metadata(status.code, status.message, status.retry_after)


# Cached, because requests that are shed together have the same status.
@lru_cache(maxsize=64)
def _retry_metadata(
    code: grpc.StatusCode, message: str, retry_after: float
) -> tuple[tuple[str, str | bytes], ...]:
    seconds, nanoseconds = divmod(round(retry_after * 1e9), 1_000_000_000)
    info = status_pb2.RetryInfo()
    info.retry_delay.seconds, info.retry_delay.nanos = seconds, nanoseconds
    rich = status_pb2.Status(code=code.value[0], message=message)
    rich.details.add(type_url=_RETRY_INFO, value=info.SerializeToString())
    pushback = str(max(1, round(retry_after * 1e3)))
    return (_DETAILS, rich.SerializeToString()), (PUSHBACK_KEY, pushback)


def _shortened(message: str) -> str:
    if message.isascii() and len(message) <= _MAX_MESSAGE_BYTES:
        return message
    # A lone surrogate has no UTF-8, and a status must be UTF-8.
    data = message.encode(errors="replace")
    if len(data) <= _MAX_MESSAGE_BYTES:
        return data.decode()
    return data[:_MAX_MESSAGE_BYTES].decode(errors="ignore") + " ..."
