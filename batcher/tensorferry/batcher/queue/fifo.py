"""A line: requests in order of arrival, of which the first leave, many at once, and now and then one from amid."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import filterfalse

from tensorferry.batcher.request import Request


class Line:
    """Guarded by the queue's lock.

    Who leaves from elsewhere than the head is noted as gone, and dropped later: to look for it would take as long
    as the line is.
    """

    __slots__ = ("_gone", "_requests", "append")

    def __init__(self) -> None:
        self._requests: list[Request] = []
        # At most half of these.
        self._gone: set[Request] = set()
        # The method itself: it is called for each request. Not for one that was here before, see `head`.
        self.append = self._requests.append

    def __len__(self) -> int:
        return len(self._requests) - len(self._gone)

    def __iter__(self) -> Iterator[Request]:
        if not self._gone:
            return iter(self._requests)
        return filterfalse(self._gone.__contains__, self._requests)

    def __reversed__(self) -> Iterator[Request]:
        return filterfalse(self._gone.__contains__, reversed(self._requests))

    def head(self, request: Request) -> None:
        """Puts a request before all others, be it one that has left."""
        self._drop_gone()
        self._requests.insert(0, request)

    def remove(self, request: Request) -> None:
        """Takes one out."""
        if self._requests[0] is request:
            del self._requests[0]
            return
        self._gone.add(request)
        self._drop_if_many()

    def remove_all(self, requests: list[Request]) -> None:
        """Takes several out."""
        queue, gone, count = self._requests, self._gone, len(requests)
        if queue[:count] == requests:
            # Nearly always.
            del queue[:count]
            return
        gone.update(requests)
        self._drop_if_many()
        if (first := next(iter(self), None)) is not None and (behind := queue.index(first)):
            gone.difference_update(queue[:behind])
            del queue[:behind]

    def _drop_if_many(self) -> None:
        if 2 * len(self._gone) >= len(self._requests):
            self._drop_gone()

    def _drop_gone(self) -> None:
        if self._gone:
            # The list itself stays: `append` is its own.
            self._requests[:] = list(self)
            self._gone.clear()
