"""Fair sharing of a class's rows between clients: start-time fair queueing.

After P. Goyal, H. Vin and H. Cheng, "Start-time Fair Queueing", 1996, with rows for bytes. Each client with queued
requests has a *virtual start*, which grows by rows / weight with every row of its that goes into a batch. The client with
the smallest virtual start is next. A client that arrives gets the virtual start of the last one served: it cannot claim
later what it did not use before, and a client that is alone gets everything.

Deadlines, the rate rule and batch sizes decide how many rows a batch has, and how much time. This module only decides
whose rows these are, so it costs no throughput. It is not used while all queued requests can make their deadlines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from heapq import heapify, heappop, heapreplace

from tensorferry.batcher.policy.protocols import BatchTimes
from tensorferry.batcher.request import Request, Share


class StartTimeFairQueue:
    """The clients of one class that have requests queued. Guarded by the queue's lock.

    A client with nothing queued is forgotten, so there are never more clients than queued rows. A client without a weight
    of its own has 1.
    """

    def __init__(self, weights: Mapping[str, int]) -> None:
        self._weights = weights
        self.shares: dict[str, Share] = {}
        # The sum of the queued clients' weights.
        self.weight = 0
        # The virtual start of the last client served.
        self._last = 0.0
        # The client that held most beyond its share when this was last computed; it may be gone.
        self._over_share = ""
        # When buckets were last compared by their clients' virtual starts; None if there is no choice.
        self.compared_at: float | None = None

    def add_rows(self, client: str, rows: int) -> None:
        """Note that rows of a client were queued."""
        share = self.shares.get(client)
        if share is None:
            share = self.shares[client] = Share(self._weights.get(client, 1), self._last)
            self.weight += share.weight
        share.rows += rows

    def remove_rows(self, client: str, rows: int) -> None:
        """Note that rows of a client are no longer queued."""
        share = self.shares[client]
        share.rows -= rows
        if not share.rows:
            self.weight -= share.weight
            del self.shares[client]
            if not self.shares:
                self._last = 0.0

    def charge(self, request: Request) -> None:
        """Advance the virtual start of its client for a request that goes into a batch. Call it before `remove_rows`."""
        share = request.charged_share = self.shares[request.client]
        if share.virtual_start > self._last:
            self._last = share.virtual_start
        share.virtual_start += request.rows_counted / share.weight

    def refund(self, request: Request) -> None:
        """Take back the charge of a request that is queued again."""
        share, request.charged_share = request.charged_share, None
        if share is not None:
            # The share of a client that had nothing queued meanwhile is gone, and with it the charge.
            share.virtual_start -= request.rows_counted / share.weight

    def compare_at(self, now: float | None) -> None:
        """Compare the clients' virtual starts at this time, if there are several; never if None."""
        self.compared_at = now if len(self.shares) > 1 else None

    def is_owed(self, client: str) -> bool:
        """Return whether a queued client has had no more than the last client served."""
        return self.shares[client].virtual_start <= self._last

    def over_share_client(self, client: str, rows: int, most: int) -> str | None:
        """Return the client that must make room in a full queue of `most` rows for `rows` of another.

        It holds the most beyond its share. None if `client` itself would exceed its share, or other classes fill the queue.
        """
        share = self.shares.get(client)
        weight = self._weights.get(client, 1)
        load = ((share.rows if share is not None else 0) + rows) / weight
        fair = most / (self.weight + (weight if share is None else 0))
        if load > fair or not self.shares:
            return None
        heaviest = self.shares.get(self._over_share)
        if heaviest is None or heaviest.load <= fair:
            # Not computed for each request: any client beyond its share will do.
            self._over_share = max(self.shares, key=lambda name: self.shares[name].load)
            heaviest = self.shares[self._over_share]
        return self._over_share if heaviest.load > fair and self._over_share != client else None


def pick_by_virtual_time(
    queues: Mapping[str, Iterator[Request]], shares: Mapping[str, Share], rows: int
) -> list[Request]:
    """Pick at most `rows` rows: always the next request of the client with the smallest virtual start.

    A client whose next request does not fit waits for another batch.
    """
    # Ties are broken by the client's place, so that requests are never compared.
    heap: list[tuple[float, int, Request]] = []
    others: list[tuple[Iterator[Request], int]] = []
    for client, queue in queues.items():
        request = next(queue, None)
        if request is not None:
            share = shares[client]
            heap.append((share.virtual_start, len(others), request))
            others.append((queue, share.weight))
    heapify(heap)
    picked: list[Request] = []
    while heap and rows > 0:
        virtual_start, place, request = heap[0]
        if request.rows_counted > rows:
            heappop(heap)
            continue
        picked.append(request)
        rows -= request.rows_counted
        queue, weight = others[place]
        following = next(queue, None)
        if following is None:
            heappop(heap)
        else:
            heapreplace(heap, (virtual_start + request.rows_counted / weight, place, following))
    return picked


def all_in_time(
    with_deadline: Sequence[Request],
    rows: int,
    most: int,
    now: float,
    times: BatchTimes,
    part: float = 1.0,
) -> bool:
    """Return whether all requests make their deadlines if full batches run in deadline order, one after the other.

    They get a `part` of the device's time. False if nothing is known of batch times.
    """
    full = times.upper(most) / part
    if not full or not with_deadline:
        return not with_deadline
    # As if all requests had equally many rows.
    each = max(1, int(most * len(with_deadline) / rows))
    end = now
    for first in range(0, len(with_deadline), each):
        end += full
        if with_deadline[first].deadline <= end:
            return False
    return True
