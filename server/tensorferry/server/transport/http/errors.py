"""Errors of the HTTP transport."""

from __future__ import annotations


class HttpError(Exception):
    """A request that is answered with an HTTP status. With `close`, the connection cannot be used afterwards.

    `headers` are lines that the response also has.
    """

    def __init__(self, status: int, message: str, *, close: bool = False, headers: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.close = close
        self.headers = headers
