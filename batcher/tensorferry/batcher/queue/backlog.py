"""The queued requests by bucket and class, and the learned cost model of each bucket."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count

from tensorferry.batcher.learning.cost_model import BatchCostModel, BucketStatistics
from tensorferry.batcher.learning.latency_model import LatencyModel
from tensorferry.batcher.policy.class_queue import ClassQueue
from tensorferry.batcher.policy.load_shedding import infeasible
from tensorferry.batcher.request import Request
from tensorferry.batcher.settings import BatcherSettings

_INF = math.inf

# A timed wait ends a little late, in seconds.
TIMER_SLACK = 300e-6
# A class queue gets priority when its oldest request has waited for this many full batches, or this many seconds
# while batch times are unknown. So no bucket starves, and no request without a deadline.
AGING_BATCHES = 8
_AGING_SECONDS = 1.0
# Buckets that are remembered with their cost models, the least recently used being forgotten first.
_MAX_BUCKETS = 256
_FORGET_TRIES = 4


class Bucket:
    """The class queues of one bucket, the highest class first. Implements `BucketView`.

    An empty bucket is kept together with its learned cost model. Guarded by the queue's lock.
    """

    __slots__ = ("class_queues", "cost_model", "requests", "rows")

    def __init__(self, cost_model: BatchCostModel, class_queues: Sequence[ClassQueue]) -> None:
        self.cost_model = cost_model
        self.class_queues = class_queues
        # How many requests are queued, and their rows.
        self.requests = self.rows = 0

    def __iter__(self) -> Iterator[Request]:
        for queue in self.class_queues:
            yield from queue

    @property
    def full_rows(self) -> int:
        """Return the rows of a full batch."""
        return self.cost_model.full_rows

    @property
    def oldest_arrival(self) -> float:
        """Return the earliest arrival among the requests at the heads of the class queues."""
        return min([queue.oldest_arrival for queue in self.class_queues])

    @property
    def earliest_deadline(self) -> float:
        """Return the earliest deadline; inf when no request has one."""
        earliest = _INF
        for queue in self.class_queues:
            if queue.with_deadline:
                earliest = min(earliest, queue.with_deadline[0].deadline)
        return earliest

    @property
    def latest_start(self) -> float:
        """Return when the batch must be dispatched to meet the earliest deadline; inf when there is none."""
        earliest = self.earliest_deadline
        if earliest == _INF:
            return _INF
        return earliest - self.cost_model.upper(self.rows) - TIMER_SLACK


class Backlog:
    """All queued requests. Not thread-safe: guarded by the queue's lock."""

    def __init__(self, settings: BatcherSettings) -> None:
        self._settings = settings
        # The buckets with queued requests; and all remembered buckets, the last used at the end.
        self.queued_buckets: dict[Hashable, Bucket] = {}
        self.all_buckets: OrderedDict[Hashable, Bucket] = OrderedDict()
        # 0 only when nothing is queued, because each request counts for at least one row.
        self.rows = 0
        # How many of the queued requests have a deadline.
        self.deadlines = 0
        self.class_rows = [0] * settings.ranks
        self._orders = count(1)
        self._warmup_samples: list[tuple[int, float]] = []

    def add_warmup_sample(self, rows: int, seconds: float, key: Hashable = None) -> None:
        """Give the cost model of one bucket, or of every bucket, the duration of a warm-up run of `rows` rows."""
        if key is not None:
            self.bucket(key).cost_model.add_warmup_sample(rows, seconds)
            return
        # Raises ValueError for nonsense here, instead of at the first request of each bucket.
        LatencyModel(self._settings.batch_rows).add_warmup_sample(rows, seconds)
        self._warmup_samples.append((rows, seconds))

    def bucket(self, key: Hashable) -> Bucket:
        """Return the bucket of a key and mark it as used; a new one if it is unknown."""
        bucket = self.all_buckets.get(key)
        if bucket is not None:
            self.all_buckets.move_to_end(key)
            return bucket
        settings = self._settings
        cost_model = BatchCostModel(
            settings.batch_rows,
            pipelined=settings.pipelined,
            adaptive=settings.sizes_pay,
            learn_times=settings.learn_times,
        )
        for rows, seconds in self._warmup_samples:
            cost_model.add_warmup_sample(rows, seconds)
        bucket = self.all_buckets[key] = Bucket(cost_model, self._class_queues())
        if len(self.all_buckets) > _MAX_BUCKETS:
            self._forget_one()
        return bucket

    @property
    def single_bucket(self) -> bool:
        """Return whether all requests so far could have shared a batch."""
        return len(self.all_buckets) == 1

    def _class_queues(self) -> Sequence[ClassQueue]:
        """Return the empty class queues of a new bucket."""
        return [ClassQueue() for _ in self.class_rows]

    def _forget_one(self) -> None:
        # A bucket in use is kept: the samples of its running batches would be lost.
        for _ in range(_FORGET_TRIES):
            key = next(iter(self.all_buckets))
            if key not in self.queued_buckets:
                del self.all_buckets[key]
                return
            self.all_buckets.move_to_end(key)

    def add(self, request: Request, *, again: bool = False) -> Bucket:
        """Queue a request and return its bucket; with `again` it was taken out before and gets its place back."""
        key, rank, rows = request.key, request.rank, request.rows_counted
        bucket = self.queued_buckets.get(key)
        if bucket is None:
            bucket = self.queued_buckets[key] = self.bucket(key)
            aging = AGING_BATCHES * bucket.cost_model.mean(bucket.full_rows) or _AGING_SECONDS
            for queue in bucket.class_queues:
                queue.max_wait_before_priority = aging
        if not again:
            request.order = next(self._orders)
        bucket.class_queues[rank].add(request)
        bucket.requests += 1
        bucket.rows += rows
        self.rows += rows
        self.class_rows[rank] += rows
        if request.deadline < _INF:
            self.deadlines += 1
        return bucket

    def put_back(self, requests: Sequence[Request]) -> None:
        """Queue requests that were taken out again."""
        for request in requests:
            self.add(request, again=True)

    def remove(self, request: Request) -> None:
        """Remove one request."""
        rows = [0] * len(self.class_rows)
        rows[request.rank] = request.rows_counted
        self.remove_all(request.key, [request], rows)

    def remove_all(self, key: Hashable, requests: list[Request], rows: Sequence[int]) -> None:
        """Remove several requests of one bucket, given in their order; `rows` gives their rows by class."""
        bucket, of_class = self.queued_buckets[key], requests
        for rank, removed in enumerate(rows):
            if not removed:
                continue
            if len(rows) > 1:
                of_class = [request for request in requests if request.rank == rank]
            queue = bucket.class_queues[rank]
            self.deadlines -= len(queue.with_deadline)
            queue.remove_all(of_class, removed)
            self.deadlines += len(queue.with_deadline)
            bucket.rows -= removed
            self.rows -= removed
            self.class_rows[rank] -= removed
        bucket.requests -= len(requests)
        if not bucket.rows:
            del self.queued_buckets[key]

    def infeasible(self, start: float, now: float) -> list[Request]:
        """Return the requests that would miss their deadlines even if they ran alone from `start` on."""
        found: list[Request] = []
        for bucket in self.queued_buckets.values():
            cost_model = bucket.cost_model
            for queue in bucket.class_queues:
                queued = queue.with_deadline
                # Usually the earliest deadline allows a full batch, so every request can be in time.
                if queued and start + cost_model.upper(self._settings.batch_rows) >= queued[0].deadline:
                    found += infeasible(queued, start, partial(cost_model.upper_if_recent, now=now))
        return found

    def next_infeasible(self, now: float) -> float:
        """Return when the first queued request can no longer meet its deadline; inf for never."""
        first = _INF
        for bucket in self.queued_buckets.values():
            earliest = bucket.earliest_deadline
            if earliest < _INF:
                first = min(first, earliest - bucket.cost_model.upper_if_recent(1, now))
        return first

    def move(self, request: Request, rank: int) -> None:
        """Give a queued request another rank; without a deadline it becomes the last of that rank."""
        self.remove(request)
        request.rank = rank
        self.add(request)

    def rows_of_classes(self, ranks_per_class: int) -> list[int]:
        """Return the queued rows of each priority class."""
        rows = self.class_rows
        return [sum(rows[first : first + ranks_per_class]) for first in range(0, len(rows), ranks_per_class)]

    def count(self, ranks: range) -> int:
        """Return how many requests of these ranks are queued."""
        return sum(
            [len(bucket.class_queues[rank]) for bucket in self.queued_buckets.values() for rank in ranks]
        )

    def count_with_deadline(self, lowest: int) -> int:
        """Return how many requests with a deadline are queued of this rank and higher ones."""
        return sum(
            [
                len(queue.with_deadline)
                for bucket in self.queued_buckets.values()
                for queue in bucket.class_queues[: lowest + 1]
            ]
        )

    def displaceable(self, rank: int, rows: int, client: str, max_rows: int) -> Sequence[Request]:
        """Return requests of lower rank whose removal makes room for `rows` rows; empty if there are too few.

        Those that would be served last are chosen. `client` sends the new rows; the queue holds `max_rows`.
        """
        if sum(self.class_rows[rank + 1 :]) < rows:
            return ()
        displaced: list[Request] = []
        for lower in range(len(self.class_rows) - 1, rank, -1):
            candidates = [
                request
                for bucket in self.queued_buckets.values()
                for request in bucket.class_queues[lower].last(rows)
            ]
            displaced += newest(candidates, rows)
            rows -= sum([request.rows_counted for request in displaced if request.rank == lower])
            if rows <= 0:
                break
        return displaced

    def drain_time(self) -> float:
        """Return how long one device takes to run all queued requests, in seconds; 0 when nothing is known."""
        if not self._settings.merge:
            return sum(
                bucket.requests
                * bucket.cost_model.mean(min(math.ceil(bucket.rows / bucket.requests), bucket.full_rows))
                for bucket in self.queued_buckets.values()
            )
        return sum(
            math.ceil(bucket.rows / bucket.full_rows)
            * bucket.cost_model.mean(min(bucket.rows, bucket.full_rows))
            for bucket in self.queued_buckets.values()
        )

    def least_time(self, rows: int, now: float) -> float:
        """Return the shortest time of a batch of `rows` rows alone, of all buckets; 0 when none is recent enough."""
        rows = min(max(rows, 1), self._settings.batch_rows)
        return min(
            [
                bucket.cost_model.end_to_end(rows)
                for bucket in self.all_buckets.values()
                if bucket.cost_model.known and bucket.cost_model.is_recent(now)
            ],
            default=0.0,
        )

    def statistics(self) -> Mapping[Hashable, BucketStatistics]:
        """Return the statistics of every remembered bucket, by its key."""
        return {
            key: bucket.cost_model.statistics(bucket.requests, bucket.rows)
            for key, bucket in self.all_buckets.items()
        }


def newest(requests: list[Request], rows: int) -> list[Request]:
    """Return the requests that arrived last, as few as have `rows` rows together."""
    chosen: list[Request] = []
    for request in sorted(requests, key=lambda request: request.arrival, reverse=True):
        if rows <= 0:
            break
        chosen.append(request)
        rows -= request.rows_counted
    return chosen
