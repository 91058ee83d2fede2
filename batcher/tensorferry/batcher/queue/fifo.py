"""FIFO of requests with cheap removal of many from the front and of a few from the middle."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import filterfalse

from tensorferry.batcher.request import Request


class FifoWithTombstones:
    """Requests in order of arrival. Guarded by the queue's lock.

    A request that is removed from the middle is only marked, and dropped later: searching for it would take time
    proportional to the length.
    """

    __slots__ = ("_requests", "_tombstones", "append")

    def __init__(self) -> None:
        self._requests: list[Request] = []
        # Removed requests that are still in the list: at most half of it.
        self._tombstones: set[Request] = set()
        # The list's own method, because it is called for each request. A request that was in here before must be
        # added with `push_front`.
        self.append = self._requests.append

    def __len__(self) -> int:
        return len(self._requests) - len(self._tombstones)

    def __iter__(self) -> Iterator[Request]:
        if not self._tombstones:
            return iter(self._requests)
        return filterfalse(self._tombstones.__contains__, self._requests)

    def __reversed__(self) -> Iterator[Request]:
        return filterfalse(self._tombstones.__contains__, reversed(self._requests))

    def push_front(self, request: Request) -> None:
        """Put a request before all others. It may have been in here before."""
        self._drop_tombstones()
        self._requests.insert(0, request)

    def remove(self, request: Request) -> None:
        """Remove one request."""
        if self._requests[0] is request:
            del self._requests[0]
            return
        self._tombstones.add(request)
        self._drop_if_many()

    def remove_all(self, requests: list[Request]) -> None:
        """Remove several requests, given in order of arrival."""
        queue, tombstones, count = self._requests, self._tombstones, len(requests)
        if queue[:count] == requests:
            # Nearly always.
            del queue[:count]
            return
        tombstones.update(requests)
        self._drop_if_many()
        if (first := next(iter(self), None)) is not None and (before := queue.index(first)):
            tombstones.difference_update(queue[:before])
            del queue[:before]

    def _drop_if_many(self) -> None:
        if 2 * len(self._tombstones) >= len(self._requests):
            self._drop_tombstones()

    def _drop_tombstones(self) -> None:
        if self._tombstones:
            # In place, because `append` belongs to this list.
            self._requests[:] = list(self)
            self._tombstones.clear()
