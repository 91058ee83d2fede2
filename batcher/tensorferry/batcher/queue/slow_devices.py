"""What a slower device takes: the requests that it can still answer in time; the others are left to faster ones."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Hashable, Mapping, Sequence
from itertools import chain

from tensorferry.batcher.learning.cost_model import Profile
from tensorferry.batcher.policy.protocols import InLine
from tensorferry.batcher.queue.bucket import Bucket, Lane
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


class LeftLane:
    """Those of a lane whom a slower device can answer in time. Implements the policy's `LaneView`."""

    __slots__ = ("aging", "dated", "patient", "rows")

    def __init__(self, lane: Lane, times: Paced, start: float, longest: float) -> None:
        self.aging = lane.aging
        self.patient: InLine[Request] = lane.patient
        # From the first on who has time for the longest batch all have for theirs.
        behind = bisect_right(lane.dated, start + longest, key=_deadline)
        left = [
            request for request in lane.dated[:behind] if request.deadline > start + times.upper(request.cost)
        ]
        self.dated: Sequence[Request] = left + lane.dated[behind:] if behind else lane.dated
        self.rows = lane.rows
        if len(left) < behind:
            self.rows = sum([request.cost for request in chain(self.dated, self.patient)])

    @property
    def oldest_arrival(self) -> float:
        """The arrival of the first that rides; inf when there is none."""
        first = self.dated[0].arrival if self.dated else math.inf
        return min(first, next(iter(self.patient)).arrival) if self.patient else first

    @property
    def due(self) -> float:
        """When the first must ride, by its deadline or by its age; inf when there is none."""
        aged = self.oldest_arrival + self.aging
        return min(self.dated[0].deadline, aged) if self.dated else aged


class LeftBucket:
    """What a bucket has for a slower device, which starts a batch at `start`. Implements the policy's `BucketView`."""

    __slots__ = ("lanes", "rows", "times")

    def __init__(self, bucket: Bucket, pace: float, start: float) -> None:
        self.times = Paced(bucket.profile, pace)
        longest = self.times.upper(bucket.profile.device.most)
        self.lanes = [LeftLane(lane, self.times, start, longest) for lane in bucket.lanes]
        self.rows = sum([lane.rows for lane in self.lanes])

    @property
    def oldest_arrival(self) -> float:
        """The earliest arrival of those that ride first in their lanes."""
        return min([lane.oldest_arrival for lane in self.lanes])

    @property
    def latest_start(self) -> float:
        """When its batch must leave at the latest for the earliest deadline to be met; inf for none."""
        earliest = min([lane.dated[0].deadline for lane in self.lanes if lane.dated], default=math.inf)
        return earliest - self.times.upper(self.rows)


def left_to(buckets: Mapping[Hashable, Bucket], pace: float, start: float) -> dict[Hashable, LeftBucket]:
    """What a slower device may take of the buckets: those that have something for it."""
    views = {key: LeftBucket(bucket, pace, start) for key, bucket in buckets.items()}
    return {key: view for key, view in views.items() if view.rows}


def _deadline(request: Request) -> float:
    return request.deadline
