"""What a slower device takes: the requests that it can still answer in time; the others are left to faster ones."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Hashable, Mapping, Sequence
from itertools import chain

from tensorferry.batcher.learning.cost_model import Profile
from tensorferry.batcher.policy.protocols import OrderedRequests
from tensorferry.batcher.queue.bucket import Bucket, ClassQueue
from tensorferry.batcher.request import Request


class Paced:
    """A bucket's batch times on a device of some pace. Implements the policy's `BatchTimes`."""

    __slots__ = ("_pace", "_profile")

    def __init__(self, profile: Profile, pace: float) -> None:
        self._profile = profile
        self._pace = pace

    @property
    def stale(self) -> bool:
        """As the bucket's."""
        return self._profile.stale

    def mean(self, rows: int) -> float:
        """As `Profile.mean`."""
        return self._profile.mean(rows) + self._more(self._profile.device.mean(rows))

    def whole(self, rows: int) -> float:
        """As `Profile.whole`."""
        return self._profile.whole(rows) + self._more(self._profile.device.mean(rows))

    def upper(self, rows: int) -> float:
        """As `Profile.upper`."""
        return self._profile.upper(rows) + self._more(self._profile.device.upper(rows))

    def _more(self, seconds: float) -> float:
        return (self._pace - 1) * seconds

    def fit(self, slack: float) -> int:
        """As `Profile.fit`."""
        most = self._profile.device.most
        if not self._profile.known or self.upper(most) <= slack:
            return most
        return bisect_right(range(1, most + 1), slack, key=self.upper)


class SlowDeviceQueueView:
    """Those of a lane whom a slower device can answer in time. Implements the policy's `ClassQueueView`."""

    __slots__ = ("max_wait_before_priority", "rows", "with_deadline", "without_deadline")

    def __init__(self, lane: ClassQueue, times: Paced, start: float, longest: float) -> None:
        self.max_wait_before_priority = lane.max_wait_before_priority
        self.without_deadline: OrderedRequests[Request] = lane.without_deadline
        # From the first on who has time for the longest batch all have for theirs.
        behind = bisect_right(lane.with_deadline, start + longest, key=_deadline)
        left = [
            request
            for request in lane.with_deadline[:behind]
            if request.deadline > start + times.upper(request.rows_counted)
        ]
        self.with_deadline: Sequence[Request] = (
            left + lane.with_deadline[behind:] if behind else lane.with_deadline
        )
        self.rows = lane.rows
        if len(left) < behind:
            self.rows = sum(
                [request.rows_counted for request in chain(self.with_deadline, self.without_deadline)]
            )

    @property
    def oldest_arrival(self) -> float:
        """The arrival of the first that rides; inf when there is none."""
        first = self.with_deadline[0].arrival if self.with_deadline else math.inf
        return min(first, next(iter(self.without_deadline)).arrival) if self.without_deadline else first

    @property
    def due(self) -> float:
        """When the first must ride, by its deadline or by its age; inf when there is none."""
        aged = self.oldest_arrival + self.max_wait_before_priority
        return min(self.with_deadline[0].deadline, aged) if self.with_deadline else aged


class SlowDeviceBucketView:
    """What a bucket has for a slower device, which starts a batch at `start`. Implements the policy's `BucketView`."""

    __slots__ = ("class_queues", "rows", "times")

    def __init__(self, bucket: Bucket, pace: float, start: float) -> None:
        self.times = Paced(bucket.profile, pace)
        longest = self.times.upper(bucket.profile.device.most)
        self.class_queues = [
            SlowDeviceQueueView(lane, self.times, start, longest) for lane in bucket.class_queues
        ]
        self.rows = sum([lane.rows for lane in self.class_queues])

    @property
    def oldest_arrival(self) -> float:
        """The earliest arrival of those that ride first in their lanes."""
        return min([lane.oldest_arrival for lane in self.class_queues])

    @property
    def latest_start(self) -> float:
        """When its batch must leave at the latest for the earliest deadline to be met; inf for none."""
        earliest = min(
            [lane.with_deadline[0].deadline for lane in self.class_queues if lane.with_deadline],
            default=math.inf,
        )
        return earliest - self.times.upper(self.rows)


def left_to(
    buckets: Mapping[Hashable, Bucket], pace: float, start: float
) -> dict[Hashable, SlowDeviceBucketView]:
    """What a slower device may take of the buckets: those that have something for it."""
    views = {key: SlowDeviceBucketView(bucket, pace, start) for key, bucket in buckets.items()}
    return {key: view for key, view in views.items() if view.rows}


def _deadline(request: Request) -> float:
    return request.deadline
