"""HTTP responses as bytes: statuses, headers, errors."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from tensorferry.server.errors import ResponseTooLargeError
from tensorferry.server.inference.reply import InferenceReply
from tensorferry.server.inference.service import InferenceService
from tensorferry.server.status import Status, StatusCode
from tensorferry.server.transport.http.errors import ErrorForm, HttpError

JSON, OCTETS, TEXT = "application/json", "application/octet-stream", "text/plain; charset=utf-8"
EVENTS = "text/event-stream; charset=utf-8"
LAST_CHUNK = b"0\r\n\r\n"

# As Triton where it has the status. It has 503 for a full queue, where clients learn from 429 that they send too much.
_STATUSES: Mapping[StatusCode, int] = {
    StatusCode.INVALID_ARGUMENT: 400,
    StatusCode.FAILED_PRECONDITION: 400,
    StatusCode.OUT_OF_RANGE: 400,
    StatusCode.UNAUTHENTICATED: 401,
    StatusCode.PERMISSION_DENIED: 403,
    StatusCode.NOT_FOUND: 404,
    StatusCode.ALREADY_EXISTS: 409,
    StatusCode.RESOURCE_EXHAUSTED: 429,
    StatusCode.CANCELLED: 499,
    StatusCode.UNIMPLEMENTED: 501,
    StatusCode.UNAVAILABLE: 503,
    StatusCode.DEADLINE_EXCEEDED: 504,
}
_REASONS: Mapping[int, str] = {
    **{status.value: status.phrase for status in HTTPStatus},
    499: "Client Closed Request",
}


def dumps(value: Any) -> bytes:
    """Return a value as JSON, without blanks."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode(errors="replace")


def response(status: int, body: bytes, content_type: str = JSON, headers: str = "") -> bytes:
    """Return a response. `headers` are further lines, each with its line break."""
    return response_head(status, len(body), content_type, headers) + body


def response_head(status: int, length: int, content_type: str = JSON, headers: str = "") -> bytes:
    """Return the head of a response whose body has this length."""
    # KServe's client compares the content type as a whole, so it has no charset.
    return (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {content_type}\r\n"
        f"{headers}Content-Length: {length}\r\n\r\n"
    ).encode("latin-1")


def json_response(value: Any, status: int = 200) -> bytes:
    """Return a response with a value as JSON."""
    return response(status, dumps(value))


def error_response(error: HttpError, form: ErrorForm) -> bytes:
    """Return the response of an error in the form of its path."""
    status, content, headers = form(error)
    if isinstance(content, str):
        return response(status, content.encode(errors="backslashreplace"), TEXT, headers)
    return response(status, dumps(content), headers=headers)


def response_of(
    error: BaseException, service: InferenceService, form: ErrorForm, reply: InferenceReply | None = None
) -> bytes:
    """Return the response of an error that a request, or its reply, raised."""
    if isinstance(error, HttpError):
        return error_response(error, form)
    status = service.status_of(error, reply)
    if isinstance(error, ResponseTooLargeError):
        # Not 429, after which clients send the same request again.
        return error_response(HttpError(400, status.message), form)
    return error_response(error_of(status), form)


def error_of(status: Status) -> HttpError:
    """Return the error of a gRPC status, with the headers by which clients time their retry."""
    headers = ""
    if status.code is StatusCode.UNAUTHENTICATED:
        headers = "WWW-Authenticate: Bearer\r\n"
    if status.retry_after is not None:
        seconds = max(0.001, status.retry_after)
        headers += f"Retry-After: {math.ceil(seconds)}\r\nretry-after-ms: {math.ceil(seconds * 1e3)}\r\n"
    return HttpError(_STATUSES.get(status.code, 500), status.message, headers=headers)


def head_of_events(*, chunked: bool, closes: bool) -> bytes:
    """Return the head of a response of server-sent events, whose number is not known."""
    lines = ["HTTP/1.1 200 OK", f"Content-Type: {EVENTS}", "Cache-Control: no-cache"]
    lines += ["Transfer-Encoding: chunked"] * chunked + ["Connection: close"] * closes
    return "\r\n".join([*lines, "", ""]).encode()


def chunk(data: bytes) -> bytes:
    """Return a chunk of a response; nothing for no data, which would be the last chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


def with_header(data: bytes, line: bytes) -> bytes:
    """Return a response with one more header, or several lines of them; unchanged for an empty line."""
    if not line:
        return data
    end = data.index(b"\r\n") + 2
    return data[:end] + line + b"\r\n" + data[end:]


def without_body(data: bytes) -> bytes:
    """Return a response's head alone, as the answer to HEAD."""
    return data[: data.index(b"\r\n\r\n") + 4]
