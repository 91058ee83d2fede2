"""Whose rows a batch has, among the clients of a class: start-time fair queueing over rows.

After P. Goyal, H. Vin and H. Cheng, "Start-time Fair Queueing", 1996, with rows for bytes. Each client that has
something queued has a *turn*, a number that grows by rows / weight with every row of its that rides; whose turn
is least rides next. Who comes anew starts at the turn of the last that rode: what he did not use when he was not
there he cannot claim later, and a client that is alone gets everything.

The order of deadlines, the rate rule and the sizes of batches are as they are without: they say how many rows
leave, and how much time those must have. Only whose rows these are is decided here, so that no throughput is
lost by it; and as long as all that wait can make their deadlines in the order of these, nobody asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from typing import Protocol, TypeVar

from tensorferry.batcher.policy.protocols import BatchTimes, QueuedRequest
from tensorferry.batcher.request import Share


class Owned(QueuedRequest, Protocol):
    """What is seen here of a queued request: whose it is, besides."""

    @property
    def client(self) -> str:
        """The client's name."""


_O = TypeVar("_O", bound=Owned)


class Turns:
    """The clients that have something queued, of one class. Not thread-safe: the queue's lock guards it.

    Who has nothing queued is forgotten, so there are never more of them than rows in the queue. A client without
    a weight of its own has 1.
    """

    __slots__ = ("_heaviest", "_last", "_weights", "compared_at", "shares", "weight")

    def __init__(self, weights: Mapping[str, int]) -> None:
        self._weights = weights
        self.shares: dict[str, Share] = {}
        # Of all that are there.
        self.weight = 0
        self._last = 0.0
        # The client that held most when somebody last looked; perhaps it is gone.
        self._heaviest = ""
        # When buckets were last compared by their clients' turns; None if there is no choice.
        self.compared_at: float | None = None

    def entered(self, client: str, rows: int) -> None:
        """So many rows of a client are queued."""
        share = self.shares.get(client)
        if share is None:
            share = self.shares[client] = Share(self._weights.get(client, 1), self._last)
            self.weight += share.weight
        share.rows += rows

    def left(self, client: str, rows: int) -> None:
        """So many rows of a client are queued no more, for whatever reason."""
        share = self.shares[client]
        share.rows -= rows
        if not share.rows:
            self.weight -= share.weight
            del self.shares[client]
            if not self.shares:
                self._last = 0.0

    def rode(self, requests: Iterable[Owned]) -> None:
        """Requests are about to ride: their clients' turns move on. To be told before `left`."""
        for request in requests:
            share = self.shares[request.client]
            if share.turn > self._last:
                self._last = share.turn
            share.turn += request.rows_counted / share.weight

    def behind(self, client: str) -> bool:
        """Whether a client with something queued had no more than the last that rode."""
        return self.shares[client].turn <= self._last

    def over(self, client: str, rows: int, most: int) -> str | None:
        """Who must make room in a full queue of `most` rows for so many of a client: who holds most beyond his share.

        None where it is the client itself that would have more than its share.
        """
        share = self.shares.get(client)
        weight = self._weights.get(client, 1)
        load = ((share.rows if share is not None else 0) + rows) / weight
        fair = most / (self.weight + (weight if share is None else 0))
        if load > fair:
            return None
        heaviest = self.shares.get(self._heaviest)
        if heaviest is None or heaviest.load <= fair:
            # Not for every request: as long as it has more than its share it is good enough.
            self._heaviest = max(self.shares, key=lambda name: self.shares[name].load)
            heaviest = self.shares[self._heaviest]
        return self._heaviest if heaviest.load > fair and self._heaviest != client else None


def choose(queues: Mapping[str, Iterator[_O]], shares: Mapping[str, Share], rows: int) -> list[_O]:
    """At most so many rows of those queued, each client's in their order: whose turn is least is next.

    A client whose next request does not fit waits for another batch.
    """
    # The place among equals is that of the client, so that requests are never compared.
    heap: list[tuple[float, int, _O]] = []
    others: list[tuple[Iterator[_O], int]] = []
    for client, queue in queues.items():
        request = next(queue, None)
        if request is not None:
            share = shares[client]
            heap.append((share.turn, len(others), request))
            others.append((queue, share.weight))
    heapify(heap)
    chosen: list[_O] = []
    while heap and rows > 0:
        turn, place, request = heap[0]
        if request.rows_counted > rows:
            heappop(heap)
            continue
        chosen.append(request)
        rows -= request.rows_counted
        queue, weight = others[place]
        following = next(queue, None)
        if following is None:
            heappop(heap)
        else:
            heapreplace(heap, (turn + request.rows_counted / weight, place, following))
    return chosen


def all_in_time(
    with_deadline: Sequence[QueuedRequest],
    rows: int,
    most: int,
    now: float,
    times: BatchTimes,
    part: float = 1.0,
) -> bool:
    """Whether all would make their deadlines, did full batches leave in the order of these, one after the other.

    They have a `part` of the device's time. False where nothing is known of batches' times.
    """
    full = times.upper(most) / part
    if not full or not with_deadline:
        return not with_deadline
    # As if all had as many rows.
    each = max(1, int(most * len(with_deadline) / rows))
    end = now
    for first in range(0, len(with_deadline), each):
        end += full
        if with_deadline[first].deadline <= end:
            return False
    return True
