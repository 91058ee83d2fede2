"""Exception → gRPC status: the one table.

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
    Shed,
)
from tensorferry.protos.standard import status_pb2
from tensorferry.protos.tensors import TensorError
from tensorferry.server.errors import (
    AlreadyExistsError,
    InvalidRequestError,
    LimitError,
    LoadFailedError,
    ModelFailedError,
    NotFoundError,
    NotReadyError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnreadResponsesError,
    UnsupportedError,
)

_log = logging.getLogger("tensorferry.server")

# A message travels in the trailing metadata, of which gRPC drops more than 8 KiB, the status with
# it; percent-encoded it takes up to three times its bytes, and where there is a hint when to retry
# it is there a second time, in base64. It may quote what the client sent.
_MAX_MESSAGE_BYTES = 1500

# Where clients look for google.rpc.Status, and how its details name their type.
_DETAILS = "grpc-status-details-bin"
_RETRY_INFO = "type.googleapis.com/google.rpc.RetryInfo"

# The bundled client looks for it before it repeats a call: a server that ended cannot have sent it.
_ANSWERED = (("tensorferry-answered", "1"),)

# What Triton says of these in front of nothing else; here it is in front of what happened.
_FULL = "Exceeds maximum queue size: "
_EXPIRED = "Request timeout expired: "

# Of a model whose outputs do not follow its rows, though it looked as if they did, or was trusted to.
_NO_ROWS = (
    "the model's answer cannot be cut into rows, so it must not be batched; start the server with --max-batch-size 0, or "
    "give the model a configuration with max_batch_size: 0, inputs and outputs: "
)


class _Row(NamedTuple):
    """`triton` is the code where Triton's are asked for, None where it is the same."""

    kind: type[BaseException]
    code: grpc.StatusCode
    triton: grpc.StatusCode | None = None
    prefix: str = ""


_TABLE = (
    _Row(InvalidRequestError, grpc.StatusCode.INVALID_ARGUMENT),
    _Row(TensorError, grpc.StatusCode.INVALID_ARGUMENT),
    _Row(InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
    _Row(RequestTooLarge, grpc.StatusCode.INVALID_ARGUMENT),
    _Row(NotFoundError, grpc.StatusCode.NOT_FOUND),
    _Row(AlreadyExistsError, grpc.StatusCode.ALREADY_EXISTS),
    _Row(LimitError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    _Row(UnauthenticatedError, grpc.StatusCode.UNAUTHENTICATED),
    _Row(PermissionDeniedError, grpc.StatusCode.PERMISSION_DENIED),
    _Row(NotReadyError, grpc.StatusCode.UNAVAILABLE),
    _Row(BatcherClosed, grpc.StatusCode.UNAVAILABLE),
    _Row(QueueFull, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE, _FULL),
    _Row(Shed, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE, _FULL),
    _Row(DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE, _EXPIRED),
    _Row(InstanceFailed, grpc.StatusCode.UNAVAILABLE),
    _Row(OutOfMemory, grpc.StatusCode.RESOURCE_EXHAUSTED),
    # Not UNAVAILABLE, which clients retry: another run would most likely take as long, and its neighbours with it.
    _Row(RunTimedOut, grpc.StatusCode.DEADLINE_EXCEEDED),
    _Row(Cancelled, grpc.StatusCode.CANCELLED),
    _Row(LoadFailedError, grpc.StatusCode.FAILED_PRECONDITION),
    _Row(UnsupportedError, grpc.StatusCode.UNIMPLEMENTED),
    _Row(ModelFailedError, grpc.StatusCode.INTERNAL),
    _Row(ModelRowsError, grpc.StatusCode.INTERNAL, prefix=_NO_ROWS),
)


_RETRIED = (QueueFull, Shed, InstanceFailed, UnreadResponsesError)


# By kind, as far as they were met: those are few, and under overload a status is all that most calls get.
_ROWS: dict[type[BaseException], _Row | None] = {}


@dataclass(frozen=True, slots=True)
class Status:
    """What a client is told; `retry_after` in seconds where retrying helps."""

    code: grpc.StatusCode
    message: str
    retry_after: float | None = None


# What a client is told of an exception that nobody foresaw.
INTERNAL = Status(grpc.StatusCode.INTERNAL, "internal error; the server's log has the details")


def status_of(
    error: BaseException, *, triton: bool = False, about: Callable[[], Mapping[str, str]] = dict
) -> Status:
    """The status of an exception; INTERNAL, and a line in the log, for one that nobody foresaw.

    `triton` asks for the code that Triton uses; `about` tells whose it is, for the log.

    Nothing else becomes of it, so its tracebacks go: their frames hold the request and its reply,
    which holds the exception, and only the garbage collector would ever free all of that.
    """
    status = mapped_status(error, triton=triton)
    if status is None:
        status = INTERNAL
        _log.error("unexpected error while serving a request", exc_info=error, extra=about())
    # Quoted, since it may hold what the client sent.
    _log.debug("answering with %s: %r", status.code.name, status.message)
    error.__traceback__ = error.__context__ = None
    return status


def code_of(error: BaseException, *, triton: bool = False) -> grpc.StatusCode:
    """The code of an exception's status, for those who count."""
    row = _row_of(type(error))
    return grpc.StatusCode.INTERNAL if row is None else _code(row, triton)


def mapped_status(error: BaseException, *, triton: bool = False) -> Status | None:
    """The status that `status_of` gives it, of which nothing is logged; None for one that nobody foresaw."""
    row = _row_of(type(error))
    if row is None:
        return None
    retry_after = error.retry_after if isinstance(error, _RETRIED) else None
    return Status(_code(row, triton), _shortened(f"{row.prefix}{error}"), retry_after)


def _code(row: _Row, triton: bool) -> grpc.StatusCode:
    return row.triton if triton and row.triton is not None else row.code


def _row_of(kind: type[BaseException]) -> _Row | None:
    try:
        return _ROWS[kind]
    except KeyError:
        row = _ROWS[kind] = next((row for row in _TABLE if issubclass(kind, row.kind)), None)
        return row


def trailing_metadata(status: Status) -> tuple[tuple[str, str | bytes], ...]:
    """When to retry, as google.rpc.RetryInfo and for grpc's own retries; for UNAVAILABLE, that this server said so.

    Without that a client cannot tell the answer from a connection that broke during its call.
    """
    if status.retry_after is None:
        return _ANSWERED if status.code is grpc.StatusCode.UNAVAILABLE else ()
    return _retry_metadata(status.code, status.message, status.retry_after)


# Those that are dropped together are told the same.
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
    return (_DETAILS, rich.SerializeToString()), ("grpc-retry-pushback-ms", pushback)


def _shortened(message: str) -> str:
    if len(message) <= _MAX_MESSAGE_BYTES // 4:
        # However many bytes its characters have.
        return message
    data = message.encode(errors="replace")
    if len(data) <= _MAX_MESSAGE_BYTES:
        return message
    return data[:_MAX_MESSAGE_BYTES].decode(errors="ignore") + " ..."
