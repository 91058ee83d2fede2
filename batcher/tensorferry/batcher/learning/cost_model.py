"""What was learned of a bucket: how long its batches keep the device, and how long the host around it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from tensorferry.batcher.learning.latency_model import Curve, LatencyModel, LatencyStatistics

# For how long an observation of a batch's time is trusted to refuse requests by it.
_FRESH_SECONDS = 1.0
# What is still predicted after a batch that took so many times less is not trusted to: one fast batch among slow ones
# teaches little, and were nobody else let in, a device that was slow once would seem so for many seconds.
_DOUBTED = 2.0
_PREPARATION_WEIGHT = 0.05
# When no batch of more than half of the most rows has run among so many, what such take is a guess.
_STALE_BATCHES = 16
# The host has no warm-up runs: so many first batches stand for them.
_HOST_ANCHORS = 4
# To learn from a short batch can take as long as the batch did. So many first ones all teach, and all
# that take so many seconds or more; of others one in about so many seconds.
_FIRST_LESSONS = 16
_LESSON_SECONDS = 2e-3
# The times between lessons differ, evenly spread: of two kinds of batches that take turns, one might
# never be learned from otherwise.
_SPREAD = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True)
class BucketStatistics:
    """A bucket's queue and what was learned of it; `device` and `host` are None until something was.

    `device` is the time of the model function, `host` that of joining the inputs before it
    and of completing the requests after it.
    """

    queued: int
    queued_rows: int
    device: LatencyStatistics | None
    host: LatencyStatistics | None


class Lesson(NamedTuple):
    """What a batch taught: how long batches keep the device, and the host, and of that the part before the device.

    `doubted`: the batch itself took far less than that.
    """

    device: Curve
    host: Curve
    preparation: float
    doubted: bool = False


class Profile:
    """How long batches of a bucket take, in seconds; kept while the bucket is empty.

    Implements the policy's `BatchTimes`. When batches are `pipelined`, the host's part is done
    while the device runs another batch and so costs no throughput. Guarded by the queue's lock, but for
    `learn`: by one thread at a time, without that lock, since it may take longer than all else.
    """

    __slots__ = (
        "_device_model",
        "_doubted",
        "_host_batches",
        "_host_model",
        "_learned_preparation",
        "_lesson_at",
        "_lessons",
        "_mean",
        "_most",
        "_pipelined",
        "_preparation",
        "_since_large",
        "_upper",
        "_whole",
        "device",
        "host",
        "longest",
        "observed",
    )

    def __init__(self, max_batch_size: int, *, pipelined: bool = False) -> None:
        self._most = max_batch_size
        self._pipelined = pipelined
        # Of `learn` alone: what is learned from, and what was of it.
        self._device_model = LatencyModel(max_batch_size)
        self._host_model = LatencyModel(max_batch_size)
        self._host_batches = 0
        self._learned_preparation = 0.5
        # What is predicted from.
        self.device = self._device_model.curve
        self.host = self._host_model.curve
        # The part of the host's time that is spent before the device can start.
        self._preparation = 0.5
        self.observed = -math.inf
        # Whether the last batch learned from took so little that the device seems not to be slow any more.
        self._doubted = False
        # As `upper` of the most rows: who has time for that has time for any.
        self.longest = 0.0
        # Batches since one of more than half of the most rows.
        self._since_large = 0
        # Batches that were learned from, and from when on a short one that leaves is again.
        self._lessons = 0
        self._lesson_at = -math.inf
        # What `upper`, `mean` and `whole` gave since the last lesson: many requests with a deadline ask
        # for the first, every arrival for the second while a batch waits for returners, every batch
        # for the third.
        self._upper: dict[int, float] = {}
        self._mean: dict[int, float] = {}
        self._whole: dict[int, float] = {}

    def anchor(self, rows: int, seconds: float) -> None:
        """A warm-up run of so many rows. As `learn`, and with the queue's lock."""
        self._device_model.anchor(rows, seconds)
        self._predict_from(Lesson(self._device_model.curve, self.host, self._preparation))

    @property
    def known(self) -> bool:
        """Whether there is anything to predict from."""
        return bool(self.device.sizes)

    def observe(
        self, now: float, rows: int, device_seconds: float, before: float = 0.0, after: float = 0.0
    ) -> None:
        """A batch of so many rows was run, prepared for `before` seconds, and completed for `after`."""
        if self.teaches(now, rows, device_seconds + before + after):
            self.believe(self.learn(rows, device_seconds, before, after), now)

    def teaches(self, now: float, rows: int, took: float) -> bool:
        """Whether a batch of so many rows, which took so many seconds in all, is to be learned from."""
        large = 2 * rows > self._most
        # By when it left: what ends at a given time is rather one of those that took long.
        due = self._doubted or now - took >= self._lesson_at
        taught = took >= _LESSON_SECONDS or due or (large and self.stale)
        # Where a large one was tried in vain, not again at once.
        self._since_large = 0 if large or self._since_large >= _STALE_BATCHES else self._since_large + 1
        if taught:
            self._lessons += 1
            if self._lessons >= _FIRST_LESSONS:
                self._lesson_at = now + _LESSON_SECONDS * (0.5 + self._lessons * _SPREAD % 1)
        return taught

    def learn(self, rows: int, device_seconds: float, before: float, after: float) -> Lesson:
        """What such a batch teaches. Nothing else sees of it before it is believed."""
        rows = min(rows, self._most)
        self._device_model.observe(rows, device_seconds)
        if host_seconds := before + after:
            self._host_batches += 1
            if self._host_batches <= _HOST_ANCHORS:
                # Not clipped: what one size says of others is hardly a guess.
                self._host_model.anchor(rows, host_seconds)
            else:
                self._host_model.observe(rows, host_seconds)
            weight = max(_PREPARATION_WEIGHT, 1 / self._host_batches)
            self._learned_preparation += weight * (before / host_seconds - self._learned_preparation)
        device, host = self._device_model.curve, self._host_model.curve
        expected = device.mean(rows) + host.mean(rows)
        doubted = expected >= max(_DOUBTED * (device_seconds + host_seconds), _LESSON_SECONDS)
        return Lesson(device, host, self._learned_preparation, doubted)

    def believe(self, lesson: Lesson, now: float) -> None:
        """From now on it is predicted from this."""
        self._doubted = lesson.doubted
        self.observed = -math.inf if lesson.doubted else now
        self._predict_from(lesson)

    def _predict_from(self, lesson: Lesson) -> None:
        self.device, self.host, self._preparation, _ = lesson
        self._upper.clear()
        self._mean.clear()
        self._whole.clear()
        self.longest = self.upper(self._most)

    @property
    def stale(self) -> bool:
        """Whether it is too long ago that large batches ran to be sure of what they take."""
        return self._since_large >= _STALE_BATCHES

    def mean(self, rows: int) -> float:
        """By how much a batch keeps the next one waiting; 0 when nothing is known. For rates."""
        seconds = self._mean.get(rows)
        if seconds is None:
            seconds = self.device.mean(rows)
            if not self._pipelined:
                seconds += self.host.mean(rows)
            self._mean[rows] = seconds
        return seconds

    def whole(self, rows: int) -> float:
        """The expected time from a batch's leaving to its answers, on an idle device; 0 when nothing is known."""
        seconds = self._whole.get(rows)
        if seconds is None:
            seconds = self._whole[rows] = self.device.mean(rows) + self.host.mean(rows)
        return seconds

    def preparation(self, rows: int) -> float:
        """How long before the device can start, a batch must leave."""
        return self.host.mean(rows) * self._preparation

    def answering(self, rows: int) -> float:
        """The part of `mean` that is spent after the device: callers answered first may be back by its end."""
        return 0.0 if self._pipelined else self.host.mean(rows) * (1 - self._preparation)

    def upper(self, rows: int) -> float:
        """As `whole`, with a margin. For feasibility only."""
        seconds = self._upper.get(rows)
        if seconds is None:
            seconds = self._upper[rows] = self.device.upper(rows) + self.host.upper(rows)
        return seconds

    def fit(self, slack: float) -> int:
        """The most rows whose `upper` is within the slack; the maximum when nothing is known."""
        if not self.host.known:
            return self.device.fit(slack)
        if not self.device.known or self.upper(self._most) <= slack:
            return self._most
        low, high = 0, self._most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.upper(middle) <= slack else (low, middle)
        return low

    def fresh(self, now: float) -> bool:
        """Whether what is predicted was learned so lately that requests may be refused by it.

        What is refused is not observed: were old knowledge trusted, a device that was slow once
        would refuse for ever.
        """
        return now - self.observed < _FRESH_SECONDS

    def needs(self, rows: int, now: float) -> float:
        """How long so many rows take at most; 0 when that is not known, or not `fresh`."""
        return self.upper(rows) if self.fresh(now) else 0.0

    def statistics(self, queued: int, queued_rows: int) -> BucketStatistics:
        """What was learned so far, beside the bucket's queue."""
        return BucketStatistics(
            queued,
            queued_rows,
            self._device_model.statistics() if self.device.known else None,
            self._host_model.statistics() if self.host.known else None,
        )
