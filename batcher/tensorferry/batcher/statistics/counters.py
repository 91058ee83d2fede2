"""Counters of a batcher since its start, and the statistics records made of them."""

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
from tensorferry.batcher.learning.return_model import ReturnStatistics
from tensorferry.batcher.request import BatchInfo, CloseReason, Request
from tensorferry.batcher.statistics.histogram import BOUNDS, INTERVALS, Histogram, interval_of, spread


@dataclass(frozen=True, slots=True)
class QueueSizes:
    """Sizes at one moment: requests and rows queued, requests running, bytes of both, rows queued by class."""

    queued: int
    queued_rows: int
    running: int
    held_bytes: int
    class_rows: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True)
class BatchSizeTimes:
    """The batches of one size that ran, and the sums of their seconds by stage.

    `input_time_sum` is the time of joining, `compute_time_sum` that of the model. `output_time_sum` runs from the
    model's end until the first answer is handed out.
    """

    batches: int
    input_time_sum: float
    compute_time_sum: float
    output_time_sum: float


@dataclass(frozen=True, slots=True)
class AnswerTimes:
    """Sums over the answered requests of their seconds from arrival to answer, by stage.

    Each request counts the times of the batch that answered it, as in `BatchSizeTimes`. The rest of its time is its
    queue delay: for its batch to be closed, for the device after that, and for another batch if one failed. A request
    that was split counts the batch of its last part.
    """

    input_time_sum: float
    compute_time_sum: float
    output_time_sum: float
    queue_delay_sum: float

    @property
    def total_sum(self) -> float:
        """The seconds from arrival to answer."""
        return self.queue_delay_sum + self.input_time_sum + self.compute_time_sum + self.output_time_sum


@dataclass(frozen=True, slots=True)
class BatcherStatistics:
    """Counts since the start; times in seconds. An outcome is counted before its callback is called.

    Requests
        Each of the `accepted` requests ends in exactly one of `answered`, `failed` (the model raised), `cancelled`,
        `expired` (the deadline passed, or could no longer be met), `shed` (dropped under overload) and `abandoned`
        (closed without draining). A request that is split counts once. `refused` requests were never accepted;
        `refusals` counts them by reason: queue_full, too_large, deadline, closed, unavailable (no device works),
        cancelled (while it waited for another request of its sequence) or invalid. `unanswered_rows` counts the rows
        of requests that were refused or ended without an answer, by these names; `unanswered_time_sum` is the time these
        requests spent in the batcher. `retried` requests went back into the queue because their device failed, and
        ended later as the others did.

    Batches
        `batch_times` has the batches that ran, by rows; `answer_times` the times of the answered requests;
        `close_reasons` why batches were closed; `failed_batches` how many failed; `last_run` when a batch was last
        answered, on the batcher's clock (None: never). `queue_delays`, `compute_times` and `latencies` are the
        histograms of the times whose sums are in `answer_times`.

    Predictions
        The total time was predicted for `predictions` batches: `predicted_time_sum` seconds in all.
        `actual_time_sum` is what they took; `prediction_error_sum` is the sum of the absolute differences. A
        prediction is counted after the batch's answers.

    This moment
        `sizes` counts each part of a split request as one. `buckets` has what is queued in each bucket and what was
        learned of it, the one used last at the end. `returners` has what was learned of clients that send again.
        `warnings` names settings that conflict with each other.

    Padding
        For the rows of padded batches, `positions` sums the rows' own lengths on the padded axis, and
        `padding_positions` what padding added.
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
    unanswered_rows: Mapping[str, int]
    unanswered_time_sum: float
    batch_times: Mapping[int, BatchSizeTimes]
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
    returners: ReturnStatistics
    warnings: Sequence[str]
    positions: int
    padding_positions: int
    retried: int
    queue_delays: Histogram
    compute_times: Histogram
    latencies: Histogram

    @property
    def full_batch_rows(self) -> int | None:
        """The rows of a full batch of the bucket that was used last; None before the first request."""
        buckets = list(self.buckets.values())
        return buckets[-1].full_rows if buckets else None

    @property
    def full_batch_row_seconds(self) -> Mapping[int, float]:
        """The seconds per row by the rows of a batch, by which `full_batch_rows` was chosen."""
        buckets = list(self.buckets.values())
        return buckets[-1].row_seconds if buckets else {}

    @property
    def batches(self) -> int:
        """The number of batches that ran."""
        return sum(times.batches for times in self.batch_times.values())

    @property
    def rows(self) -> int:
        """The number of rows in all batches that ran."""
        return sum(rows * times.batches for rows, times in self.batch_times.items())

    @property
    def batch_rows(self) -> Mapping[int, int]:
        """The number of batches that ran, by rows."""
        return {rows: times.batches for rows, times in self.batch_times.items()}

    @property
    def compute_time_sum(self) -> float:
        """The time that the model ran for all batches: the busy time of the devices."""
        return sum(times.compute_time_sum for times in self.batch_times.values())

    @property
    def queue_delay_sum(self) -> float:
        """The time that all answered requests were queued; see `AnswerTimes`."""
        return self.answer_times.queue_delay_sum

    @property
    def padding_waste(self) -> float:
        """The share of padding in the padded inputs, from 0 to 1; 0 if nothing was padded."""
        total = self.positions + self.padding_positions
        return self.padding_positions / total if total else 0.0


# The outcome of an accepted request by its error; "failed" for any other error.
_OUTCOMES: tuple[tuple[type[BaseException], str], ...] = (
    (Cancelled, "cancelled"),
    (DeadlineExceeded, "expired"),
    (Shed, "shed"),
    (BatcherClosed, "abandoned"),
)
# The reason of a refusal by its error; "invalid" for any other error.
_REFUSALS: tuple[tuple[type[BaseException], str], ...] = (
    (QueueFull, "queue_full"),
    (RequestTooLarge, "too_large"),
    (DeadlineExceeded, "deadline"),
    (BatcherClosed, "closed"),
    (InstanceFailed, "unavailable"),
    (Cancelled, "cancelled"),
)


def _name_of(error: BaseException, names: tuple[tuple[type[BaseException], str], ...], other: str) -> str:
    for kind, name in names:
        if isinstance(error, kind):
            return name
    return other


class Counters:
    """Counters of a batcher. Thread-safe."""

    def __init__(self) -> None:
        # Guards every field below. Held for a few additions only; nothing is called while it is held.
        self._lock = threading.Lock()
        # By a batch's rows: the number of batches, and the seconds of joining, running, handing out.
        self._sizes: dict[int, list[Any]] = {}
        self._last_run: float | None = None
        self._reasons: Counter[CloseReason] = Counter()
        self._failed_batches = 0
        self._answered = 0
        # Sums over the answered requests.
        self._queue_delay_sum = 0.0
        self._input_sum = 0.0
        self._compute_sum = 0.0
        self._output_sum = 0.0
        # Counts of answered requests by the intervals of their histograms.
        self._queue_delays = [0] * INTERVALS
        self._compute_times = [0] * INTERVALS
        self._latencies = [0] * INTERVALS
        # Counts of the other requests.
        self._outcomes: Counter[str] = Counter()
        self._refusals: Counter[str] = Counter()
        self._unanswered_rows: Counter[str] = Counter()
        self._unanswered_sum = 0.0
        self._positions = 0
        self._padding_positions = 0
        self._retried = 0
        self._predictions = 0
        self._predicted_time_sum = 0.0
        self._actual_time_sum = 0.0
        self._prediction_error_sum = 0.0

    def refused(self, error: BaseException, rows: int) -> None:
        """Count a request that was not accepted."""
        reason = _name_of(error, _REFUSALS, "invalid")
        with self._lock:
            self._refusals[reason] += 1
            self._unanswered_rows["refused"] += rows

    def ran(self, info: BatchInfo, latencies: list[float], now: float, *, again: bool) -> None:
        """Count a batch that ran, and the requests that it answers; with `again` it is a part of a batch.

        `latencies` has the seconds since arrival of each request that is answered; this method sorts it.
        """
        input_time, compute_time, output_time = info.input_time, info.compute_time, info.output_time
        answered, batch_time = len(latencies), input_time + compute_time + output_time
        total = sum(latencies)
        latencies.sort()
        in_latencies = spread(latencies) if answered else ()
        in_delays = spread(latencies, batch_time) if answered else ()
        in_compute_time = bisect_left(BOUNDS, compute_time)
        queue_delay = total - answered * batch_time
        with self._lock:
            self._compute_times[in_compute_time] += answered
            for interval, count in in_latencies:
                self._latencies[interval] += count
            for interval, count in in_delays:
                self._queue_delays[interval] += count
            if info.reason is not None and not again:
                self._reasons[info.reason] += 1
            size = self._sizes.get(info.rows)
            if size is None:
                size = self._sizes[info.rows] = [0, 0.0, 0.0, 0.0]
            size[0] += 1
            size[1] += input_time
            size[2] += compute_time
            size[3] += output_time
            self._answered += answered
            # Rounding may make it negative, and a counter never decreases.
            if queue_delay > 0.0:
                self._queue_delay_sum += queue_delay
            self._input_sum += answered * input_time
            self._compute_sum += answered * compute_time
            self._output_sum += answered * output_time
            self._last_run = now

    def answered_in_parts(self, total: float, last: BatchInfo, rows: int = 0) -> None:
        """Count a split request, answered after `total` seconds, its last part by this batch; or one without a batch.

        With `rows`, it also counts as a batch of so many, because its parts' batches are counted elsewhere.
        """
        queue_delay = max(0.0, total - (last.input_time + last.compute_time + last.output_time))
        with self._lock:
            if rows:
                size = self._sizes.setdefault(rows, [0, 0.0, 0.0, 0.0])
                size[0] += 1
                size[1] += last.input_time
                size[2] += last.compute_time
                size[3] += last.output_time
            self._answered += 1
            self._latencies[interval_of(total)] += 1
            self._queue_delays[interval_of(queue_delay)] += 1
            self._compute_times[interval_of(last.compute_time)] += 1
            self._queue_delay_sum += queue_delay
            self._input_sum += last.input_time
            self._compute_sum += last.compute_time
            self._output_sum += last.output_time

    def failed(self, error: BaseException, rows: int, total: float) -> None:
        """Count an accepted request that ended with an error after `total` seconds."""
        outcome = _name_of(error, _OUTCOMES, "failed")
        with self._lock:
            self._outcomes[outcome] += 1
            self._unanswered_rows[outcome] += rows
            self._unanswered_sum += total

    def failed_to_run(self, reason: CloseReason | None) -> None:
        """Count a failed batch; `reason` is None for a part of a batch."""
        with self._lock:
            if reason is not None:
                self._reasons[reason] += 1
            self._failed_batches += 1

    def retried(self, requests: int) -> None:
        """Count requests that went back into the queue because their device failed."""
        with self._lock:
            self._retried += requests

    def padded(self, batch: Sequence[Request], length: int) -> None:
        """Count the padding of a batch whose requests were padded to this length."""
        rows = sum(request.rows for request in batch)
        positions = 0
        for request in batch:
            if (plan := request.padding) is not None:
                positions += request.rows * plan.length - plan.stacked
        with self._lock:
            self._positions += positions
            self._padding_positions += rows * length - positions

    def predicted(self, predicted: float, actual: float) -> None:
        """Count a batch that was predicted to take `predicted` seconds and took `actual`."""
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
        returners: ReturnStatistics,
        warnings: Sequence[str],
    ) -> BatcherStatistics:
        """The counts so far, beside what the queue says."""
        with self._lock:
            outcomes = self._outcomes
            times = AnswerTimes(self._input_sum, self._compute_sum, self._output_sum, self._queue_delay_sum)
            return BatcherStatistics(
                accepted=accepted,
                refused=self._refusals.total(),
                answered=self._answered,
                failed=outcomes["failed"],
                cancelled=outcomes["cancelled"],
                expired=outcomes["expired"],
                shed=outcomes["shed"],
                abandoned=outcomes["abandoned"],
                refusals=dict(self._refusals),
                unanswered_rows=dict(self._unanswered_rows),
                unanswered_time_sum=self._unanswered_sum,
                batch_times={rows: BatchSizeTimes(*size) for rows, size in self._sizes.items()},
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
                queue_delays=Histogram(tuple(self._queue_delays), times.queue_delay_sum),
                compute_times=Histogram(tuple(self._compute_times), times.compute_time_sum),
                latencies=Histogram(tuple(self._latencies), times.total_sum),
            )
