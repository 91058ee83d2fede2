"""A backlog whose clients share its batches and its room by weight: what is queued is known by client, too."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from operator import attrgetter

from tensorferry.batcher.policy.batch_forming import FormedBatch
from tensorferry.batcher.policy.client_fairness import StartTimeFairQueue, all_in_time, pick_by_virtual_time
from tensorferry.batcher.policy.protocols import BatchTimes
from tensorferry.batcher.queue.backlog import AGING_BATCHES, Backlog
from tensorferry.batcher.queue.bucket import Bucket, ClassQueue
from tensorferry.batcher.request import Request
from tensorferry.batcher.settings import Limits

_edf_key = attrgetter("edf_key")

_INF = math.inf

# A client that is owed service comes first this many full batches' time before its deadline: one batch may just have
# been dispatched, and one of another client may follow.
_TIMELY_BATCHES = 3
# Subtracted from a deadline or arrival, it sorts before all others.
_LONG_AGO = 1e9


class FairClassQueue(ClassQueue):
    """A lane that has one for each of its clients, beside that of all. Guarded by the queue's lock."""

    __slots__ = ("clients", "turns")

    def __init__(self, turns: StartTimeFairQueue) -> None:
        super().__init__()
        self.turns = turns
        self.clients: dict[str, ClassQueue] = {}

    @property
    def serve_by(self) -> float:
        """The time by which the first request is to be served.

        If buckets compete, a client that is owed service comes before all deadlines of others once its own deadline
        is near. It is not served earlier, because a batch of its requests would be smaller than necessary.
        """
        serve_by, turns = super().serve_by, self.turns
        now = turns.compared_at
        if now is None:
            return serve_by
        max_wait = self.max_wait_before_priority
        near = now + max_wait * _TIMELY_BATCHES / AGING_BATCHES
        for client, own in self.clients.items():
            if not turns.is_owed(client):
                continue
            if own.with_deadline and own.with_deadline[0].deadline <= near:
                serve_by = min(serve_by, own.with_deadline[0].deadline - _LONG_AGO)
            if (
                own.without_deadline
                and (arrival := next(iter(own.without_deadline)).arrival) + max_wait / 2 <= now
            ):
                serve_by = min(serve_by, arrival - _LONG_AGO)
        return serve_by

    def add(self, request: Request) -> None:
        """Puts a request in its place."""
        super().add(request)
        self._own(request.client).add(request)
        self.turns.add_rows(request.client, request.rows_counted)

    def _own(self, client: str) -> ClassQueue:
        own = self.clients.get(client)
        if own is None:
            own = self.clients[client] = ClassQueue()
        return own

    def put_back(self, request: Request) -> None:
        """As `ClassQueue.put_back`; its client's turn is as if it had not ridden, which it is to do once more."""
        super().put_back(request)
        if request.deadline == _INF:
            # Where it has one, `add` was asked.
            self._own(request.client).put_back(request)
            self.turns.add_rows(request.client, request.rows_counted)
        share, request.charged_share = request.charged_share, None
        if share is not None:
            # That of a client which had nothing queued meanwhile is gone, and with it what it paid.
            share.virtual_start -= request.rows_counted / share.weight

    def remove(self, request: Request) -> None:
        """Takes a request out."""
        super().remove(request)
        self._left(request)

    def remove_all(self, requests: list[Request], rows: int) -> None:
        """Takes several out, of so many rows together; those with a deadline in the order of these."""
        super().remove_all(requests, rows)
        if len(self.clients) == 1:
            # Nobody shares with it.
            self._all_left(requests[0].client, requests, rows)
            return
        each: dict[str, list[Request]] = {}
        for request in requests:
            each.setdefault(request.client, []).append(request)
        for client, own in each.items():
            self._all_left(client, own, sum([request.rows_counted for request in own]))

    def _all_left(self, client: str, requests: list[Request], rows: int) -> None:
        own = self.clients[client]
        own.remove_all(requests, rows)
        if not own.rows:
            del self.clients[client]
        self.turns.remove_rows(client, rows)

    def rows_ahead(self, request: Request) -> float:
        """As `ClassQueue.rows_ahead`: its client's own, and as many of the others as ride meanwhile by their weights."""
        own = self.clients.get(request.client)
        if own is None:
            return 0.0
        turns = self.turns
        shared = own.rows_ahead(request) * turns.weight / turns.shares[request.client].weight
        return min(super().rows_ahead(request), shared)

    def _left(self, request: Request) -> None:
        client = request.client
        own = self.clients[client]
        own.remove(request)
        if not own.rows:
            del self.clients[client]
        self.turns.remove_rows(client, request.rows_counted)


class FairBacklog(Backlog):
    """The queued requests, by client. Not thread-safe: the queue's lock guards it.

    `weights` has those of clients that have another than 1.
    """

    def __init__(self, limits: Limits, classes: int, weights: Mapping[str, int], *, pipelined: bool) -> None:
        super().__init__(limits, classes, pipelined=pipelined)
        self._turns = [StartTimeFairQueue(weights) for _ in range(classes)]

    def _class_queues(self) -> Sequence[ClassQueue]:
        """Return the empty class queues of a new bucket."""
        return [FairClassQueue(turns) for turns in self._turns]

    def look(self, now: float) -> None:
        """Note the time before a bucket is chosen; clients are compared only if there are several of both."""
        for turns in self._turns:
            compare = len(self.buckets) > 1 and len(turns.shares) > 1
            turns.compared_at = now if compare else None

    def displaceable(self, rank: int, rows: int, client: str, most: int) -> Sequence[Request]:
        """As `Backlog.displaceable`; and if those are not enough, who would ride last of the client with most rows.

        That is one that has more than its share of a full queue of `most` rows, for one that has less.
        """
        lower = super().displaceable(rank, rows, client, most)
        if lower:
            return lower
        turns = self._turns[rank]
        heaviest = turns.over_share_client(client, rows, most)
        if heaviest is None or turns.shares[heaviest].rows < rows:
            return ()
        found: list[Request] = []
        for bucket in self.buckets.values():
            lane = bucket.class_queues[rank]
            assert isinstance(lane, FairClassQueue)
            if heaviest in lane.clients:
                found += lane.clients[heaviest].last(rows)
        found.sort(key=lambda request: request.arrival, reverse=True)
        displaced: list[Request] = []
        for request in found:
            if rows <= 0:
                break
            displaced.append(request)
            rows -= request.rows_counted
        return displaced

    def share(
        self, formed: FormedBatch[Request], bucket: Bucket, now: float, times: BatchTimes, most: int
    ) -> FormedBatch[Request]:
        """The same batch with as many rows of each class, of the clients whose turn it is.

        Whoever rides instead of another has at least as late a deadline as the first of those chosen had.
        """
        batch: list[Request] = []
        rows = list(formed.rows)
        rode = formed.batch
        for rank, lane in enumerate(bucket.class_queues):
            assert isinstance(lane, FairClassQueue)
            if not rows[rank]:
                continue
            riding = rode
            if len(rows) > 1:
                riding = [request for request in rode if request.rank == rank]
            if len(lane.clients) > 1 and rows[rank] < lane.rows:
                riding = self._shared(riding, lane, now, times, most)
                rows[rank] = sum([request.rows_counted for request in riding])
            _charge(lane.turns, riding)
            batch += riding
        return FormedBatch(batch, formed.shed, rows)

    def _shared(
        self, riding: list[Request], lane: FairClassQueue, now: float, times: BatchTimes, most: int
    ) -> list[Request]:
        with_deadline = [request for request in riding if request.deadline < math.inf]
        without_deadline = riding
        if with_deadline:
            without_deadline = [request for request in riding if request.deadline == math.inf]
            dated_rows = (
                sum([request.rows_counted for request in lane.with_deadline])
                if lane.without_deadline
                else lane.rows
            )
            part = lane.rows / self.rows
            if not all_in_time(lane.with_deadline, dated_rows, most, now, times, part):
                first = with_deadline[0].edf_key
                with_deadline = self._chosen(
                    with_deadline, lane, {name: _dated_from(own, first) for name, own in lane.clients.items()}
                )
                # Whoever removes them looks for neighbours.
                with_deadline.sort(key=_edf_key)
        if without_deadline:
            without_deadline = self._chosen(
                without_deadline,
                lane,
                {name: iter(own.without_deadline) for name, own in lane.clients.items()},
            )
        return with_deadline + without_deadline

    def _chosen(
        self, riding: list[Request], lane: FairClassQueue, queues: Mapping[str, Iterator[Request]]
    ) -> list[Request]:
        rows = sum([request.rows_counted for request in riding])
        chosen = pick_by_virtual_time(queues, lane.turns.shares, rows)
        room = rows - sum([request.rows_counted for request in chosen])
        if room and chosen != riding:
            # What fits nobody whose turn it is: for those who would have ridden anyway.
            taken = set(chosen)
            for request in riding:
                if request.rows_counted <= room and request not in taken:
                    chosen.append(request)
                    room -= request.rows_counted
        return chosen


def _charge(turns: StartTimeFairQueue, riding: Sequence[Request]) -> None:
    turns.charge(riding)
    shares = turns.shares
    for request in riding:
        request.charged_share = shares[request.client]


def _dated_from(own: ClassQueue, order: tuple[float, int]) -> Iterator[Request]:
    start = bisect_left(own.with_deadline, order, key=_edf_key) if own.with_deadline else 0
    return islice(own.with_deadline, start, None)
