"""Cost model of a bucket: the time that its batches take on the device and on the host around it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tensorferry.batcher.learning.latency_model import Curve, LatencyModel, LatencyStatistics
from tensorferry.batcher.learning.paying_rows import PayingRows

# Requests are refused by predictions only for this long after the last sample.
_FRESH_SECONDS = 1.0
# After a batch that was this many times faster than predicted, predictions refuse nothing: one fast batch among slow ones
# changes the model little, and if nothing else ran, a device that was slow once would seem slow for many seconds.
_SUSPECT_FACTOR = 2.0
_LEAD_WEIGHT = 0.05
# After this many batches without one of more than half of the largest size, the time of large batches is a guess.
_STALE_BATCHES = 16
# The host has no warm-up runs: its first batches take their place.
_HOST_ANCHORS = 4
# After a warm-up of few rows, a batch of at least this many times the rows of every earlier one is not learned. It is
# slower, because memory is allocated. Times of up to this many times the rows of the largest learned batch are no guess.
_GROWTH = 2
# Learning can take as long as a short batch. The first batches, and all that take at least `_SAMPLE_SECONDS`, are
# learned; of the others one in about that time, and one in `_STEADY_SECONDS` while samples are as expected: the last
# `_FIRST_SAMPLES` within this factor.
_FIRST_SAMPLES = 16
_SAMPLE_SECONDS = 2e-3
_STEADY_SECONDS = 20e-3
_STEADY_FACTOR = 1.5
# The times between samples vary evenly (golden ratio), because one of two alternating kinds of batches might otherwise
# never be sampled.
_SPREAD = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True)
class BucketStatistics:
    """A bucket's queue, and its learned times; `device` and `host` are None until something was learned.

    `device` is the time of the model function. `host` is the time of joining the inputs before it and of completing
    the requests after it. `full_rows` are the rows of a full batch: those that pay by `row_seconds`, the seconds per row of
    batches by their rows.
    """

    queued: int
    queued_rows: int
    full_rows: int
    row_seconds: Mapping[int, float]
    device: LatencyStatistics | None
    host: LatencyStatistics | None


class CostUpdate(NamedTuple):
    """Observation of one batch: times on device and host, the host's share before the device, and the rows of the `largest`
    batch that was learned.

    `rows` and `seconds` are its rows, and by how much it delayed the next batch; 0 for a warm-up run. `suspect` says that
    the batch was much faster than these times, `expected` that it took about as long.
    """

    device: Curve
    host: Curve
    lead_share: float
    largest: int
    rows: int = 0
    seconds: float = 0.0
    suspect: bool = False
    expected: bool = False


class _TimesByRows(dict[int, float]):
    """Seconds by rows, each computed when it is first looked up."""

    __slots__ = ("_seconds",)

    def __init__(self, seconds: Callable[[int], float]) -> None:
        self._seconds = seconds

    def __missing__(self, rows: int) -> float:
        seconds = self[rows] = self._seconds(rows)
        return seconds


class BatchCostModel:
    """Times of a bucket's batches, in seconds; kept while the bucket is empty. Implements the policy's `BatchTimes`.

    If batches are `pipelined`, the host works while the device runs another batch, so its part costs no throughput.
    After a warm-up of few rows, a larger batch counts as long as the largest that was learned, so that no request is refused
    by a guess. Without `learn_times` no batch is learned.
    Guarded by the queue's lock, but for `learn`.
    """

    __slots__ = (
        "_anchored",
        "_device_model",
        "_host_batches",
        "_host_model",
        "_largest",
        "_lead_share",
        "_learn_times",
        "_learned_lead_share",
        "_most",
        "_paying",
        "_pipelined",
        "_ran",
        "_sample_at",
        "_samples",
        "_since_large",
        "_steady",
        "_suspect",
        "_tables",
        "device",
        "device_time",
        "end_to_end",
        "full_rows",
        "host",
        "known",
        "mean",
        "observed",
        "response_time",
        "upper",
    )

    def __init__(
        self,
        max_batch_size: int,
        *,
        pipelined: bool = False,
        adaptive: bool = True,
        learn_times: bool = True,
    ) -> None:
        self._most = max_batch_size
        self._learn_times = learn_times
        self._pipelined = pipelined
        # Chooses the rows of a full batch; None if they are `max_batch_size`.
        self._paying = PayingRows(max_batch_size) if adaptive and max_batch_size > 1 else None
        self.full_rows = max_batch_size
        # The rows of the largest batch that ran, and of the largest that was learned, as published; the maximum without a
        # warm-up, because nothing is known then.
        self._ran = self._largest = max_batch_size
        # Used by `learn` only, as all until `observed`. It is published as `_largest`.
        self._anchored = max_batch_size
        self._device_model = LatencyModel(max_batch_size)
        self._host_model = LatencyModel(max_batch_size)
        self._host_batches = 0
        self._learned_lead_share = 0.5
        self.observed = -math.inf
        # Whether the last sample was so fast that the device seems to have recovered from a slow spell.
        self._suspect = False
        # Batches since one of more than half of the largest size.
        self._since_large = 0
        # Batches that were learned, and the time from which on a short batch is learned again.
        self._samples = 0
        self._sample_at = -math.inf
        # Samples since one that was not as expected.
        self._steady = 0
        # The published curves, whether anything was learned, and the share of the host's time before the device can start.
        self.device, self.host = self._device_model.curve, self._host_model.curve
        self.known = False
        self._lead_share = 0.5
        # Times are looked up several times for each decision, so they are kept until the next update. These are functions
        # of the rows: the time on the device; that from closing a batch to its answers, if the device is idle; and the
        # same with a margin, for feasibility only. All are 0 if nothing is known.
        device_time = _TimesByRows(lambda rows: self.device.mean(rows))
        end_to_end = _TimesByRows(lambda rows: self.device.mean(rows) + self.host.mean(rows))
        upper = _TimesByRows(
            lambda rows: (
                self.device.upper(min(rows, self._largest)) + self.host.upper(min(rows, self._largest))
            )
        )
        response_time = _TimesByRows(
            lambda rows: 0.0 if pipelined else self.host.mean(rows) * (1 - self._lead_share)
        )
        self._tables = (device_time, end_to_end, upper, response_time)
        self.device_time, self.end_to_end = device_time.__getitem__, end_to_end.__getitem__
        self.upper = upper.__getitem__
        # By how much a batch delays the next one, for rates; and its part after the device: the clients answered first
        # may send again by its end.
        self.mean = self.device_time if pipelined else self.end_to_end
        self.response_time = response_time.__getitem__

    def add_warmup_sample(self, rows: int, seconds: float) -> None:
        """Learn a warm-up run. One thread at a time, with the queue's lock."""
        self._ran = self._anchored = max(rows, self._anchored) if self.known else rows
        self._device_model.add_warmup_sample(rows, seconds)
        self._predict_from(CostUpdate(self._device_model.curve, self.host, self._lead_share, self._anchored))

    def observe(
        self, now: float, rows: int, device_seconds: float, before: float = 0.0, after: float = 0.0
    ) -> None:
        """Learn a batch with `before` and `after` seconds on the host, if it should be learned."""
        if self.should_learn(now, rows, device_seconds + before + after):
            self.publish(self.learn(rows, device_seconds, before, after), now)

    def should_learn(self, now: float, rows: int, took: float) -> bool:
        """Return whether to learn a batch that took `took` seconds in all."""
        if not self._learn_times:
            return False
        first, self._ran = rows >= _GROWTH * self._ran, max(rows, self._ran)
        if first:
            return False
        large = 2 * rows > self.full_rows
        # Judged by its start, because long batches are more likely to end at a given time.
        due = self._suspect or now - took >= self._sample_at
        taught = took >= _SAMPLE_SECONDS or due or (large and self.stale)
        if self._paying is not None and rows == self._paying.trial:
            taught = True
        # After a large batch that taught nothing, wait before the next one is tried.
        self._since_large = 0 if large or self._since_large >= _STALE_BATCHES else self._since_large + 1
        if taught:
            self._samples += 1
            if self._samples >= _FIRST_SAMPLES:
                pause = _STEADY_SECONDS if self._steady >= _FIRST_SAMPLES else _SAMPLE_SECONDS
                self._sample_at = now + pause * (0.5 + self._samples * _SPREAD % 1)
        return taught

    def learn(self, rows: int, device_seconds: float, before: float, after: float) -> CostUpdate:
        """Learn a batch and return the update, which nothing uses before it is published.

        One thread at a time, without the lock, because it may take longer than everything else that is done for a batch.
        """
        rows = min(rows, self._most)
        if rows > self._anchored:
            # As a warm-up run it is not clipped: predictions from smaller sizes are poor.
            self._anchored = rows
            self._device_model.add_warmup_sample(rows, device_seconds)
        else:
            self._device_model.observe(rows, device_seconds)
        if host_seconds := before + after:
            self._host_batches += 1
            if self._host_batches <= _HOST_ANCHORS:
                # For the same reason.
                self._host_model.add_warmup_sample(rows, host_seconds)
            else:
                self._host_model.observe(rows, host_seconds)
            weight = max(_LEAD_WEIGHT, 1 / self._host_batches)
            self._learned_lead_share += weight * (before / host_seconds - self._learned_lead_share)
        device, host = self._device_model.curve, self._host_model.curve
        predicted, took = device.mean(rows) + host.mean(rows), device_seconds + host_seconds
        suspect = predicted >= max(_SUSPECT_FACTOR * took, _SAMPLE_SECONDS)
        expected = took <= _STEADY_FACTOR * predicted and predicted <= _STEADY_FACTOR * took
        delay = device_seconds if self._pipelined else took
        share, largest = self._learned_lead_share, self._anchored
        return CostUpdate(device, host, share, largest, rows, delay, suspect, expected)

    def publish(self, update: CostUpdate, now: float) -> None:
        """Use an update for predictions from now on."""
        self._suspect = update.suspect
        self._steady = self._steady + 1 if update.expected else 0
        self.observed = -math.inf if update.suspect else now
        self._predict_from(update)
        if self._paying is not None:
            self._paying.observe(update.rows, update.seconds, now)
            self.full_rows = self._paying.rows

    def _predict_from(self, update: CostUpdate) -> None:
        self.device, self.host, self._lead_share, self._largest, *_ = update
        self.known = self.device.known
        for table in self._tables:
            table.clear()

    def next_rows(self, queued: int, slack: float, now: float) -> int:
        """Return the most rows of the next batch: those of a full one, or other rows whose time is to be learned.

        There are `queued` rows, whose first deadline is `slack` seconds away.
        """
        return self._most if self._paying is None else self._paying.next_rows(queued, slack, now, self.mean)

    @property
    def grows(self) -> bool:
        """Whether the time of a full batch is a guess, because only smaller ones have run since a warm-up."""
        return _GROWTH * self._largest < self.full_rows

    @property
    def stale(self) -> bool:
        """Whether large batches have not run for so long that their time is a guess."""
        return self._since_large >= _STALE_BATCHES

    def host_lead_time(self, rows: int) -> float:
        """Return the host's time before the device can start a batch."""
        return self.host.mean(rows) * self._lead_share

    def max_rows_within(self, slack: float) -> int:
        """Return the most rows whose `upper` is within the slack; the maximum if nothing is known."""
        if not self.known or self.upper(self._most) <= slack:
            return self._most
        if not self.host.sizes:
            return self.device.max_rows_within(slack)
        low, high = 0, self._most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.upper(middle) <= slack else (low, middle)
        return low

    def is_recent(self, now: float) -> bool:
        """Return whether the last sample is recent enough to refuse requests by predictions.

        Refused requests are never measured: if old samples were trusted, a device that was slow once would refuse for ever.
        """
        return now - self.observed < _FRESH_SECONDS

    def upper_if_recent(self, rows: int, now: float) -> float:
        """Return `upper` if it is `is_recent`, else 0."""
        return self.upper(rows) if self.is_recent(now) else 0.0

    def statistics(self, queued: int, queued_rows: int) -> BucketStatistics:
        """Return what was learned so far, beside the sizes of the bucket's queue."""
        return BucketStatistics(
            queued,
            queued_rows,
            self.full_rows,
            dict(sorted(self._paying.row_seconds.items())) if self._paying is not None else {},
            self._device_model.statistics() if self.device.known else None,
            self._host_model.statistics() if self.host.known else None,
        )
