"""The backlog: what is queued, by bucket and class, and what was learned of each bucket."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from functools import partial

from tensorferry.batcher.learning.cost_model import BucketStatistics, Profile
from tensorferry.batcher.learning.latency_model import LatencyModel
from tensorferry.batcher.policy.batch_forming import infeasible
from tensorferry.batcher.queue.bucket import Bucket
from tensorferry.batcher.request import Request
from tensorferry.batcher.settings import Limits

# A lane is due when its oldest request has waited for so many full batches, or so many seconds
# as long as a batch's time is not known; so no bucket and no request without deadline starves.
AGING_BATCHES = 8
_AGING_SECONDS = 1.0
# So many buckets are kept with what was learned of them, the last used.
_BUCKETS = 256
_FORGET_TRIES = 4


class Backlog:
    """The queued requests. Not thread-safe: the queue's lock guards it."""

    def __init__(self, limits: Limits, classes: int, *, pipelined: bool) -> None:
        self._limits = limits
        self._pipelined = pipelined
        # Those that have something queued; and all, the last used at the end.
        self.buckets: dict[Hashable, Bucket] = {}
        self._known: OrderedDict[Hashable, Bucket] = OrderedDict()
        # As each request counts for at least one, it is 0 only when nothing is queued.
        self.rows = 0
        self.class_rows = [0] * classes
        self._anchors: list[tuple[int, float]] = []

    def __len__(self) -> int:
        return sum([len(bucket) for bucket in self.buckets.values()])

    def anchor(self, rows: int, seconds: float, key: Hashable = None) -> None:
        """A warm-up run of so many rows: what a bucket's model of the device starts from, or every one's."""
        if key is not None:
            self.profile(key).anchor(rows, seconds)
            return
        # What makes no sense is refused here, and not at the first request of each bucket.
        LatencyModel(self._limits.max_batch_size).anchor(rows, seconds)
        self._anchors.append((rows, seconds))

    def profile(self, key: Hashable) -> Profile:
        """What was learned of a bucket."""
        return self.bucket(key).profile

    def bucket(self, key: Hashable) -> Bucket:
        """The bucket of a key, which is used now; a new one if it is not known."""
        bucket = self.buckets.get(key)
        if bucket is not None:
            return bucket
        bucket = self._known.get(key)
        if bucket is not None:
            self._known.move_to_end(key)
            return bucket
        profile = Profile(self._limits.max_batch_size, pipelined=self._pipelined)
        for rows, seconds in self._anchors:
            profile.anchor(rows, seconds)
        bucket = self._known[key] = self._new_bucket(profile)
        if len(self._known) > _BUCKETS:
            self._forget_one()
        return bucket

    @property
    def one_kind(self) -> bool:
        """Whether all requests so far could have ridden together."""
        return len(self._known) == 1

    def _new_bucket(self, profile: Profile) -> Bucket:
        return Bucket(profile, len(self.class_rows))

    def _forget_one(self) -> None:
        # Not one that is in use: its batches would be learned from, and what is learned lost.
        for _ in range(_FORGET_TRIES):
            key = next(iter(self._known))
            if key not in self.buckets:
                del self._known[key]
                return
            self._known.move_to_end(key)

    def add(self, request: Request, bucket: Bucket) -> None:
        """Puts a request into the bucket of its key."""
        rows, rank = request.rows_counted, request.rank
        if not bucket.rows:
            self._begin(bucket, request.key)
        lane = bucket.class_queues[rank]
        if request.deadline == math.inf:
            # As `ClassQueue.add` does, without a call.
            lane.without_deadline.append(request)
            lane.rows += rows
        else:
            lane.add(request)
        bucket.rows += rows
        self.rows += rows
        self.class_rows[rank] += rows

    def _begin(self, bucket: Bucket, key: Hashable) -> None:
        """Something is about to be queued in a bucket."""
        self.buckets[key] = bucket
        full = AGING_BATCHES * bucket.profile.mean(self._limits.max_batch_size)
        for lane in bucket.class_queues:
            lane.max_wait_before_priority = full or _AGING_SECONDS

    def put_back(self, requests: Sequence[Request]) -> None:
        """Puts requests that had left together to the heads of their lanes, in the order in which they rode."""
        for request in reversed(requests):
            bucket = self.bucket(request.key)
            if not bucket.rows:
                self._begin(bucket, request.key)
            bucket.class_queues[request.rank].put_back(request)
            bucket.rows += request.rows_counted
            self.rows += request.rows_counted
            self.class_rows[request.rank] += request.rows_counted

    def remove(self, request: Request) -> None:
        """Takes a request out."""
        bucket = self.buckets[request.key]
        bucket.class_queues[request.rank].remove(request)
        self._removed(bucket, request.key, request.rank, request.rows_counted)

    def remove_all(self, key: Hashable, requests: list[Request], rows: Sequence[int]) -> None:
        """Takes requests of one bucket out, of so many rows of each class.

        Those of a class with deadlines are in the order of these.
        """
        bucket = self.buckets[key]
        if len(rows) == 1:
            bucket.class_queues[0].remove_all(requests, rows[0])
            self._removed(bucket, key, 0, rows[0])
            return
        for rank, lane in enumerate(bucket.class_queues):
            if rows[rank]:
                lane.remove_all([request for request in requests if request.rank == rank], rows[rank])
                self._removed(bucket, key, rank, rows[rank])

    def _removed(self, bucket: Bucket, key: Hashable, rank: int, rows: int) -> None:
        bucket.rows -= rows
        if not bucket.rows:
            del self.buckets[key]
        self.rows -= rows
        self.class_rows[rank] -= rows

    def infeasible(self, start: float, now: float) -> list[Request]:
        """Those who cannot make their deadlines any more, even if they ran alone from `start` on."""
        dead: list[Request] = []
        for bucket in self.buckets.values():
            profile, earliest = bucket.profile, bucket.earliest_deadline
            if earliest == math.inf:
                continue
            # The usual case: the earliest has time for a full batch, so all have for their own.
            if start + profile.longest < earliest:
                continue
            needs = partial(profile.needs, now=now)
            for lane in bucket.class_queues:
                dead += infeasible(lane.with_deadline, start, needs)
        return dead

    def next_infeasible(self, now: float) -> float:
        """When the first of those queued will not make its deadline any more; inf for never."""
        first = math.inf
        for bucket in self.buckets.values():
            earliest = bucket.earliest_deadline
            if earliest < math.inf:
                first = min(first, earliest - bucket.profile.needs(1, now))
        return first

    def move(self, request: Request, rank: int) -> None:
        """Gives a request another rank; among those who have it, it is the last without a deadline."""
        self.remove(request)
        request.rank = rank
        self.add(request, self.bucket(request.key))

    def rows_of_classes(self, ranks: int) -> list[int]:
        """The rows queued of each class, which has so many ranks."""
        rows = self.class_rows
        return [sum(rows[first : first + ranks]) for first in range(0, len(rows), ranks)]

    def requests(self, ranks: range) -> int:
        """How many requests are queued, of these ranks."""
        return sum([len(bucket.class_queues[rank]) for bucket in self.buckets.values() for rank in ranks])

    def with_deadline(self, lowest: int) -> int:
        """How many requests with a deadline are queued, of a class and those above it."""
        return sum(
            [
                len(lane.with_deadline)
                for bucket in self.buckets.values()
                for lane in bucket.class_queues[: lowest + 1]
            ]
        )

    def displaceable(self, rank: int, rows: int, client: str, most: int) -> Sequence[Request]:
        """Those of lower classes who make room for so many rows, who would ride last; empty if they cannot.

        The rows are a client's, and the queue holds `most`.
        """
        if sum(self.class_rows[rank + 1 :]) < rows:
            return ()
        displaced: list[Request] = []
        for lower in range(len(self.class_rows) - 1, rank, -1):
            class_queues = [bucket.class_queues[lower] for bucket in self.buckets.values()]
            candidates = sorted(
                (request for lane in class_queues for request in lane.last(rows)),
                key=lambda request: request.arrival,
                reverse=True,
            )
            for request in candidates:
                if rows <= 0:
                    return displaced
                displaced.append(request)
                rows -= request.rows_counted
        return displaced

    def drain_time(self) -> float:
        """How long one device takes for all that is queued, in seconds; 0 when nothing is known."""
        most = self._limits.max_batch_size
        if not self._limits.merges:
            return sum(
                len(bucket) * bucket.profile.mean(min(math.ceil(bucket.rows / len(bucket)), most))
                for bucket in self.buckets.values()
            )
        return sum(
            math.ceil(bucket.rows / most) * bucket.profile.mean(min(bucket.rows, most))
            for bucket in self.buckets.values()
        )

    def slowest_batch(self) -> float:
        """How long the slowest batch that may leave now keeps the device, in seconds; inf when that is not known."""
        most, slowest = self._limits.max_batch_size, 0.0
        for bucket in self.buckets.values():
            rows, device = bucket.rows, bucket.profile.device
            if not device.sizes:
                return math.inf
            slowest = max(slowest, device.mean(rows if rows < most else most))
        return slowest

    def statistics(self) -> Mapping[Hashable, BucketStatistics]:
        """Every bucket that is known, by its key."""
        found = {}
        for key, bucket in self._known.items():
            found[key] = bucket.profile.statistics(len(bucket), bucket.rows)
        return found
