"""Backlog whose clients share its batches and its room by weight."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from tensorferry.batcher.policy.batch_forming import FormedBatch
from tensorferry.batcher.policy.class_queue import ClassQueue, edf_key
from tensorferry.batcher.policy.client_fairness import StartTimeFairQueue, all_in_time, pick_by_virtual_time
from tensorferry.batcher.policy.protocols import BatchTimes
from tensorferry.batcher.queue.backlog import (
    AGING_BATCHES,
    Backlog,
    Bucket,
    newest,
)
from tensorferry.batcher.request import Request
from tensorferry.batcher.settings import BatcherSettings

_INF = math.inf

# A client that is owed service comes first this many full batches' time before its deadline: one batch may just have
# been dispatched, and one of another client may follow.
_TIMELY_BATCHES = 3
# Subtracted from a deadline or arrival, it sorts before all others.
_LONG_AGO = 1e9


class FairClassQueue(ClassQueue):
    """A class queue that also has a queue for each of its clients. Guarded by the queue's lock."""

    __slots__ = ("clients", "fair_queue")

    def __init__(self, fair_queue: StartTimeFairQueue) -> None:
        super().__init__()
        self.fair_queue = fair_queue
        self.clients: dict[str, ClassQueue] = {}

    @property
    def serve_by(self) -> float:
        """Return when the first request must be served.

        If buckets compete, a client that is owed service comes before all deadlines of others once its own deadline
        is near. It is not served earlier, because a batch of its requests would be smaller than necessary.
        """
        serve_by, fair_queue = super().serve_by, self.fair_queue
        now = fair_queue.compared_at
        if now is None:
            return serve_by
        max_wait = self.max_wait_before_priority
        near = now + max_wait * _TIMELY_BATCHES / AGING_BATCHES
        for client, own in self.clients.items():
            if not fair_queue.is_owed(client):
                continue
            if own.with_deadline and own.with_deadline[0].deadline <= near:
                serve_by = min(serve_by, own.with_deadline[0].deadline - _LONG_AGO)
            if own.without_deadline:
                arrival = own.without_deadline[0].arrival
                if arrival + max_wait / 2 <= now:
                    serve_by = min(serve_by, arrival - _LONG_AGO)
        return serve_by

    def add(self, request: Request) -> None:
        """Insert a request in its order."""
        super().add(request)
        own = self.clients.get(request.client)
        if own is None:
            own = self.clients[request.client] = ClassQueue()
        own.add(request)
        self.fair_queue.add_rows(request.client, request.rows_counted)

    def remove_all(self, requests: list[Request], rows: int) -> None:
        """Remove several requests of `rows` rows in all, given in their order."""
        super().remove_all(requests, rows)
        if len(self.clients) == 1:
            self._remove_of_client(requests[0].client, requests, rows)
            return
        by_client: dict[str, list[Request]] = {}
        for request in requests:
            by_client.setdefault(request.client, []).append(request)
        for client, own in by_client.items():
            self._remove_of_client(client, own, sum([request.rows_counted for request in own]))

    def _remove_of_client(self, client: str, requests: list[Request], rows: int) -> None:
        own = self.clients[client]
        own.remove_all(requests, rows)
        if not own.rows:
            del self.clients[client]
        self.fair_queue.remove_rows(client, rows)

    def rows_ahead(self, request: Request) -> float:
        """Estimate how many rows are served before a request: those of its client, and the others' share meanwhile."""
        own = self.clients.get(request.client)
        if own is None:
            return 0.0
        fair_queue = self.fair_queue
        shared = own.rows_ahead(request) * fair_queue.weight / fair_queue.shares[request.client].weight
        return min(super().rows_ahead(request), shared)


class FairBacklog(Backlog):
    """The queued requests by client. Guarded by the queue's lock."""

    def __init__(self, settings: BatcherSettings) -> None:
        super().__init__(settings)
        weights = settings.clients.weights if settings.clients is not None else {}
        self._fair_queues = [StartTimeFairQueue(weights) for _ in range(settings.ranks)]

    def _class_queues(self) -> Sequence[ClassQueue]:
        """Return the empty class queues of a new bucket."""
        return [FairClassQueue(fair_queue) for fair_queue in self._fair_queues]

    def compare_clients(self, now: float) -> None:
        """Compare clients in the choice of the next bucket, if there are several buckets and clients."""
        for fair_queue in self._fair_queues:
            fair_queue.compare_at(now if len(self.queued_buckets) > 1 else None)

    def put_back(self, requests: Sequence[Request]) -> None:
        """Queue requests that were taken out again, and take back what their clients were charged for them."""
        super().put_back(requests)
        for request in requests:
            self._fair_queues[request.rank].refund(request)

    def displaceable(self, rank: int, rows: int, client: str, max_rows: int) -> Sequence[Request]:
        """Return requests whose removal makes room for `rows` rows of a client; empty if there are too few.

        If there are too few of lower rank, a client with less than its share of a full queue displaces the last
        requests of one with more.
        """
        lower = super().displaceable(rank, rows, client, max_rows)
        if lower:
            return lower
        fair_queue = self._fair_queues[rank]
        heaviest = fair_queue.over_share_client(client, rows, max_rows)
        if heaviest is None or fair_queue.shares[heaviest].rows < rows:
            return ()
        found: list[Request] = []
        for bucket in self.queued_buckets.values():
            queue = bucket.class_queues[rank]
            assert isinstance(queue, FairClassQueue)
            if heaviest in queue.clients:
                found += queue.clients[heaviest].last(rows)
        return newest(found, rows)

    def share(
        self, formed: FormedBatch, bucket: Bucket, now: float, times: BatchTimes, max_rows: int
    ) -> FormedBatch:
        """Return a batch with as many rows of each class, but of the clients that are next by fair queueing.

        A request that replaces another has a deadline not earlier than the first one of the batch given.
        """
        batch: list[Request] = []
        rows = list(formed.rows)
        for rank, queue in enumerate(bucket.class_queues):
            assert isinstance(queue, FairClassQueue)
            if not rows[rank]:
                continue
            members = formed.batch
            if len(rows) > 1:
                members = [request for request in members if request.rank == rank]
            if len(queue.clients) > 1 and rows[rank] < queue.rows:
                members = self._share_class(members, queue, now, times, max_rows)
                rows[rank] = sum([request.rows_counted for request in members])
            batch += members
        return FormedBatch(batch, formed.shed, rows)

    def charge(self, batch: Sequence[Request]) -> None:
        """Charge the clients for the requests of a batch, which are still queued."""
        for request in batch:
            self._fair_queues[request.rank].charge(request)

    def _share_class(
        self, members: list[Request], queue: FairClassQueue, now: float, times: BatchTimes, max_rows: int
    ) -> list[Request]:
        """Return as many rows of one class, of the clients that are next."""
        with_deadline = [request for request in members if request.deadline < _INF]
        without_deadline = [request for request in members if request.deadline == _INF]
        if with_deadline:
            rows = sum([request.rows_counted for request in queue.with_deadline])
            if not all_in_time(queue.with_deadline, rows, max_rows, now, times, queue.rows / self.rows):
                first = edf_key(with_deadline[0])
                with_deadline = self._pick(
                    with_deadline,
                    queue,
                    {client: _from_deadline(own, first) for client, own in queue.clients.items()},
                )
                # `ClassQueue.remove_all` needs them in order.
                with_deadline.sort(key=edf_key)
        if without_deadline:
            without_deadline = self._pick(
                without_deadline,
                queue,
                {client: iter(own.without_deadline) for client, own in queue.clients.items()},
            )
        return with_deadline + without_deadline

    def _pick(
        self, members: list[Request], queue: FairClassQueue, by_client: Mapping[str, Iterator[Request]]
    ) -> list[Request]:
        """Pick as many rows as the members have, from the queues of the clients that are next."""
        rows = sum([request.rows_counted for request in members])
        picked = pick_by_virtual_time(by_client, queue.fair_queue.shares, rows)
        room = rows - sum([request.rows_counted for request in picked])
        if room and picked != members:
            # No next request of a client fits the rest, so the members given first fill it.
            taken = set(picked)
            for request in members:
                if request.rows_counted <= room and request not in taken:
                    picked.append(request)
                    room -= request.rows_counted
        return picked


def _from_deadline(own: ClassQueue, first: tuple[float, int]) -> Iterator[Request]:
    """Iterate over a client's requests from this key on."""
    start = bisect_left(own.with_deadline, first, key=edf_key) if own.with_deadline else 0
    return islice(own.with_deadline, start, None)
