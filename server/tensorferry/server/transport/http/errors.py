"""Errors of the HTTP transport, and their forms: each family of paths has that of the protocol whose clients call it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tensorferry.server.errors import truncate

# In characters.
_MAX_TEXT = 8192

_OPENAI_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}
# The client of OpenAI sends a request again after these, which would fail again.
_NOT_AGAIN = (501, 504)
_TEI_TYPES: Mapping[int, str] = {429: "Overloaded", 503: "Unhealthy"}


class HttpError(Exception):
    """A request that is answered with an HTTP status. `headers` are lines that the response also has."""

    def __init__(self, status: int, message: str, *, headers: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers


class ErrorBody(NamedTuple):
    """The status, the JSON object, or the plain text, and further headers of an error."""

    status: int
    content: Mapping[str, Any] | str
    headers: str


ErrorForm = Callable[[HttpError], ErrorBody]


def v2_form(error: HttpError) -> ErrorBody:
    """Return an error of the v2 protocol, as Triton has it."""
    return ErrorBody(error.status, {"error": _text(error)}, error.headers)


def _openai_form(error: HttpError) -> ErrorBody:
    status = error.status
    kind = _OPENAI_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    headers = error.headers + ("x-should-retry: false\r\n" if status in _NOT_AGAIN else "")
    return ErrorBody(
        status, {"error": {"message": _text(error), "type": kind, "param": None, "code": None}}, headers
    )


def _tei_form(error: HttpError) -> ErrorBody:
    """Return an error of Text Embeddings Inference, which has 422 for a bad request and 424 for a failed model."""
    status = {400: 422, 500: 424}.get(error.status, error.status)
    kind = _TEI_TYPES.get(status, "Backend" if status == 424 or status >= 500 else "Validation")
    return ErrorBody(status, {"error": _text(error), "error_type": kind}, error.headers)


def _cohere_form(error: HttpError) -> ErrorBody:
    return ErrorBody(error.status, {"message": _text(error)}, error.headers)


_FORMS: tuple[tuple[re.Pattern[str], ErrorForm], ...] = (
    (re.compile("/v[12]/rerank"), _cohere_form),
    (re.compile("/v1(/.*)?|/score"), _openai_form),
    (
        re.compile(
            "(/models/[^/]+)?(/|/embed|/embed_all|/predict|/rerank|/tokenize)|/models/[^/]+|/info|/health"
        ),
        _tei_form,
    ),
)


def form_of(path: str) -> ErrorForm:
    """Return the form of errors of a path."""
    return next((form for pattern, form in _FORMS if pattern.fullmatch(path)), v2_form)


def _text(error: HttpError) -> str:
    # It can quote the request.
    return truncate(str(error), _MAX_TEXT)
