"""What a batcher has done: counts since its start, and sizes of the moment."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tensorferry.batcher.errors import (
    BatcherClosed,
    Cancelled,
    DeadlineExceeded,
    InstanceFailed,
    QueueFull,
    RequestTooLarge,
    Shed,
)
from tensorferry.batcher.learning.cost_model import BucketStatistics
from tensorferry.batcher.learning.return_model import ReturnersStatistics
from tensorferry.batcher.request import BatchInfo, CloseReason, Request
from tensorferry.batcher.statistics.histogram import BOUNDS, INTERVALS, Distribution, interval_of, spread


@dataclass(frozen=True, slots=True)
class QueueSizes:
    """A moment's sizes: requests and rows queued, requests running, bytes held by both; rows queued by class."""

    queued: int
    queued_rows: int
    running: int
    held_bytes: int
    class_rows: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """The batches of one size that ran, and the seconds that they took, all together, by stage.

    `input_time_sum` went into joining, `compute_time_sum` is the model's, and `output_time_sum` is
    from its end until the answers were handed out: splitting, and finding out who is still there.
    """

    batches: int
    input_time_sum: float
    compute_time_sum: float
    output_time_sum: float


@dataclass(frozen=True, slots=True)
class AnswerTimes:
    """The seconds that the answered requests took, from arrival to answer, summed over the requests.

    Each has the times of the batch that it was answered from, as in `BatchTimes`, and what is left of
    its time is its queue delay: waiting for its batch to leave, for the device after that, and, where
    a batch had failed, for another. Of a request that was split, the batch is its last part's.
    """

    input_time_sum: float
    compute_time_sum: float
    output_time_sum: float
    queue_delay_sum: float

    @property
    def total_sum(self) -> float:
        """From arrival to answer."""
        return self.queue_delay_sum + self.input_time_sum + self.compute_time_sum + self.output_time_sum


@dataclass(frozen=True, slots=True)
class BatcherStatistics:
    """Counts since the start; times in seconds. Who has the outcome of a request finds it counted.

    `accepted` requests end in exactly one of `answered`, `failed` (the model raised),
    `cancelled`, `expired` (the deadline passed, or could not be met any more), `shed` (dropped
    under overload) and `abandoned` (closed without draining). One that is split is one request.
    `refused` ones were never accepted; `refusals` says why: queue_full, too_large, deadline,
    closed, unavailable (no device works) or invalid. `ended_rows` are the rows of those that were refused or ended without an
    answer, by these names, and `unanswered_time_sum` is how long they were here.

    `batch_times` tells of the batches that ran, by their rows, `answer_times` of the answered
    requests, `close_reasons` why batches left, `failed_batches` how many failed, and `last_run` when
    one was last answered, on the batcher's clock (None: never).
    Of `predictions` batches it was predicted how long they take until they are answered:
    `predicted_time_sum` in all, `actual_time_sum` they took, and `prediction_error_sum` is the sum
    of the differences' sizes; this is known, and counted, after the answers. `sizes` is of this
    moment, a part of a split request counting as one there; `buckets` says what is queued in each
    bucket and what was learned of it, `returners` what of callers that come back. `warnings` name
    limits that get in each other's way.

    Of the rows that ran in padded batches, `positions` sums the lengths along the padded axis
    that the requests had, `padding_positions` those that padding added.

    `retried` requests, which ended as the others did, went back into the queue since their device failed.

    Of the answered requests, `queue_delays`, `compute_times` and `latencies` say how the times were spread
    whose sums are in `answer_times`.
    """

    accepted: int
    refused: int
    answered: int
    failed: int
    cancelled: int
    expired: int
    shed: int
    abandoned: int
    refusals: Mapping[str, int]
    ended_rows: Mapping[str, int]
    unanswered_time_sum: float
    batch_times: Mapping[int, BatchTimes]
    answer_times: AnswerTimes
    close_reasons: Mapping[CloseReason, int]
    failed_batches: int
    last_run: float | None
    predictions: int
    predicted_time_sum: float
    actual_time_sum: float
    prediction_error_sum: float
    sizes: QueueSizes
    buckets: Mapping[Hashable, BucketStatistics]
    returners: ReturnersStatistics
    warnings: Sequence[str]
    positions: int
    padding_positions: int
    retried: int
    queue_delays: Distribution
    compute_times: Distribution
    latencies: Distribution

    @property
    def batches(self) -> int:
        """How many batches ran."""
        return sum(times.batches for times in self.batch_times.values())

    @property
    def rows(self) -> int:
        """How many rows the batches that ran had, all together."""
        return sum(rows * times.batches for rows, times in self.batch_times.items())

    @property
    def batch_rows(self) -> Mapping[int, int]:
        """How many batches of so many rows ran."""
        return {rows: times.batches for rows, times in self.batch_times.items()}

    @property
    def compute_time_sum(self) -> float:
        """How long the model ran for the batches, all together: the device's busy time."""
        return sum(times.compute_time_sum for times in self.batch_times.values())

    @property
    def queue_delay_sum(self) -> float:
        """How long the answered requests waited, all together; see `AnswerTimes`."""
        return self.answer_times.queue_delay_sum

    @property
    def padding_waste(self) -> float:
        """The share of padding in the padded inputs, from 0 to 1; 0 when nothing was padded."""
        total = self.positions + self.padding_positions
        return self.padding_positions / total if total else 0.0


# What an accepted request's error makes of it; with any other it failed.
_ENDS: tuple[tuple[type[BaseException], str], ...] = (
    (Cancelled, "cancelled"),
    (DeadlineExceeded, "expired"),
    (Shed, "shed"),
    (BatcherClosed, "abandoned"),
)
# Why a request was not accepted; otherwise it was invalid.
_REFUSALS: tuple[tuple[type[BaseException], str], ...] = (
    (QueueFull, "queue_full"),
    (RequestTooLarge, "too_large"),
    (DeadlineExceeded, "deadline"),
    (BatcherClosed, "closed"),
    (InstanceFailed, "unavailable"),
)


def _name_of(error: BaseException, names: tuple[tuple[type[BaseException], str], ...], other: str) -> str:
    for kind, name in names:
        if isinstance(error, kind):
            return name
    return other


class Ledger:
    """Counts what happens in a batcher. Thread-safe."""

    def __init__(self) -> None:
        # Guards every field below; held for a few additions, nothing is called.
        self._lock = threading.Lock()
        self._batches = 0
        # Of batches by their rows: how many, and the seconds of joining, running, handing out.
        self._sizes: dict[int, list[Any]] = {}
        self._last_run: float | None = None
        self._reasons: Counter[CloseReason] = Counter()
        self._failed_batches = 0
        self._answered = 0
        # Of the answered requests.
        self._queue_delay_sum = 0.0
        self._input_sum = 0.0
        self._compute_sum = 0.0
        self._output_sum = 0.0
        # How many of them were in each interval of their distributions.
        self._queue_delays = [0] * INTERVALS
        self._compute_times = [0] * INTERVALS
        self._latencies = [0] * INTERVALS
        # Of the others.
        self._ends: Counter[str] = Counter()
        self._refusals: Counter[str] = Counter()
        self._ended_rows: Counter[str] = Counter()
        self._unanswered_sum = 0.0
        self._positions = 0
        self._padding_positions = 0
        self._retried = 0
        self._predictions = 0
        self._predicted_time_sum = 0.0
        self._actual_time_sum = 0.0
        self._prediction_error_sum = 0.0

    def refused(self, error: BaseException, rows: int) -> None:
        """A request of so many rows was not accepted, for this reason."""
        reason = _name_of(error, _REFUSALS, "invalid")
        with self._lock:
            self._refusals[reason] += 1
            self._ended_rows["refused"] += rows

    def ran(
        self,
        rows: int,
        input_time: float,
        compute_time: float,
        output_time: float,
        reason: CloseReason | None,
        latencies: list[float],
        now: float,
    ) -> int:
        """A batch of so many rows ran; returns its running number, from 1.

        The times are of the stages in `BatchTimes`. `reason` is why it left; None for one that is a
        part of another. `latencies` says for how long each of the requests that it answers has been here; it
        is sorted here.
        """
        answered, batch_time = len(latencies), input_time + compute_time + output_time
        more = answered > 1
        in_latencies: Sequence[tuple[int, int]] = ()
        in_delays = in_latencies
        if more:
            total = sum(latencies)
            latencies.sort()
            in_latencies = spread(latencies)
            in_delays = spread(latencies, batch_time)
        else:
            # Apart, and without calls of ours: a batch of one has nobody to share them with.
            total = latencies[0] if answered else 0.0
            in_latency = bisect_left(BOUNDS, total)
            in_delay = bisect_left(BOUNDS, total - batch_time)
        in_compute_time = bisect_left(BOUNDS, compute_time)
        queue_delay = total - answered * batch_time
        with self._lock:
            self._compute_times[in_compute_time] += answered
            if more:
                for interval, count in in_latencies:
                    self._latencies[interval] += count
                for interval, count in in_delays:
                    self._queue_delays[interval] += count
            else:
                self._latencies[in_latency] += answered
                self._queue_delays[in_delay] += answered
            if reason is not None:
                self._reasons[reason] += 1
            size = self._sizes.get(rows)
            if size is None:
                size = self._sizes[rows] = [0, 0.0, 0.0, 0.0]
            size[0] += 1
            size[1] += input_time
            size[2] += compute_time
            size[3] += output_time
            self._answered += answered
            # By rounding it may be below 0, and a counter never falls.
            if queue_delay > 0.0:
                self._queue_delay_sum += queue_delay
            self._input_sum += answered * input_time
            self._compute_sum += answered * compute_time
            self._output_sum += answered * output_time
            self._last_run = now
            self._batches += 1
            return self._batches

    def answered_in_parts(self, total: float, last: BatchInfo) -> None:
        """A request that was split is answered after `total` seconds, its last part from this batch."""
        queue_delay = max(0.0, total - (last.input_time + last.compute_time + last.output_time))
        with self._lock:
            self._answered += 1
            self._latencies[interval_of(total)] += 1
            self._queue_delays[interval_of(queue_delay)] += 1
            self._compute_times[interval_of(last.compute_time)] += 1
            self._queue_delay_sum += queue_delay
            self._input_sum += last.input_time
            self._compute_sum += last.compute_time
            self._output_sum += last.output_time

    def answered_empty(self) -> None:
        """A request of no rows is answered at once, from no batch."""
        with self._lock:
            self._answered += 1
            self._latencies[0] += 1
            self._queue_delays[0] += 1
            self._compute_times[0] += 1

    def failed(self, error: BaseException, rows: int, total: float) -> None:
        """An accepted request of so many rows ended with this error, after `total` seconds."""
        end = _name_of(error, _ENDS, "failed")
        with self._lock:
            self._ends[end] += 1
            self._ended_rows[end] += rows
            self._unanswered_sum += total

    def failed_to_run(self, reason: CloseReason | None) -> None:
        """A batch failed, whose requests run again in smaller ones or fail with it; `reason` as in `ran`."""
        with self._lock:
            if reason is not None:
                self._reasons[reason] += 1
            self._failed_batches += 1

    def retried(self, requests: int) -> None:
        """So many requests went back into the queue: their device failed."""
        with self._lock:
            self._retried += requests

    def padded(self, batch: Sequence[Request], padded_length: int) -> None:
        """A batch ran with its requests' rows padded to this length."""
        rows = sum(request.rows for request in batch)
        positions = sum(request.rows * request.padding.length for request in batch if request.padding)
        with self._lock:
            self._positions += positions
            self._padding_positions += rows * padded_length - positions

    def predicted(self, predicted: float, actual: float) -> None:
        """A batch was answered after `actual` seconds, of which `predicted` had been predicted."""
        with self._lock:
            self._predictions += 1
            self._predicted_time_sum += predicted
            self._actual_time_sum += actual
            self._prediction_error_sum += abs(actual - predicted)

    def statistics(
        self,
        accepted: int,
        sizes: QueueSizes,
        buckets: Mapping[Hashable, BucketStatistics],
        returners: ReturnersStatistics,
        warnings: Sequence[str],
    ) -> BatcherStatistics:
        """The counts so far."""
        with self._lock:
            ends = self._ends
            times = AnswerTimes(self._input_sum, self._compute_sum, self._output_sum, self._queue_delay_sum)
            return BatcherStatistics(
                accepted=accepted,
                refused=self._refusals.total(),
                answered=self._answered,
                failed=ends["failed"],
                cancelled=ends["cancelled"],
                expired=ends["expired"],
                shed=ends["shed"],
                abandoned=ends["abandoned"],
                refusals=dict(self._refusals),
                ended_rows=dict(self._ended_rows),
                unanswered_time_sum=self._unanswered_sum,
                batch_times={rows: BatchTimes(*size) for rows, size in self._sizes.items()},
                answer_times=times,
                close_reasons=dict(self._reasons),
                failed_batches=self._failed_batches,
                last_run=self._last_run,
                predictions=self._predictions,
                predicted_time_sum=self._predicted_time_sum,
                actual_time_sum=self._actual_time_sum,
                prediction_error_sum=self._prediction_error_sum,
                sizes=sizes,
                buckets=buckets,
                returners=returners,
                warnings=warnings,
                positions=self._positions,
                padding_positions=self._padding_positions,
                retried=self._retried,
                queue_delays=Distribution(tuple(self._queue_delays), times.queue_delay_sum),
                compute_times=Distribution(tuple(self._compute_times), times.compute_time_sum),
                latencies=Distribution(tuple(self._latencies), times.total_sum),
            )
