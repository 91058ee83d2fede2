"""Prefixes of an ordered queue by rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from tensorferry.batcher.request import Request


def take_prefix(requests: Iterable[Request], rows: int) -> list[Request]:
    """Return the longest prefix of at most `rows` rows; it always has the first request."""
    # Each request counts for at least one row, mostly for exactly one: then the whole slice is the answer.
    head = list(islice(requests, max(1, rows)))
    if total_rows(head) <= rows:
        return head
    return take_prefix_that_fits(head, rows) or head[:1]


def take_prefix_that_fits(requests: Iterable[Request], rows: int) -> list[Request]:
    """Return the longest prefix of at most `rows` rows; it may be empty."""
    prefix: list[Request] = []
    for request in requests:
        if request.rows_counted > rows:
            break
        prefix.append(request)
        rows -= request.rows_counted
    return prefix


def total_rows(requests: Sequence[Request]) -> int:
    """Return the sum of the requests' rows."""
    return sum([request.rows_counted for request in requests])
