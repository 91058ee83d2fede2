"""What a batcher has done: counts since its start, and sizes of the moment."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from tensorferry.batcher.errors import BatcherClosed, Cancelled, DeadlineExceeded, Shed
from tensorferry.batcher.policy import CloseReason
from tensorferry.batcher.profile import BucketStatistics
from tensorferry.batcher.request import Request
from tensorferry.batcher.returners import ReturnersStatistics


@dataclass(frozen=True, slots=True)
class QueueSizes:
    """A moment's sizes: requests and rows queued, requests running, bytes held by both; rows queued by class."""

    queued: int
    queued_rows: int
    running: int
    held_bytes: int
    class_rows: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True)
class BatcherStatistics:
    """Counts since the start; times in seconds.

    `accepted` requests end in exactly one of `answered`, `failed` (the model raised),
    `cancelled`, `expired` (the deadline passed, or could not be met any more), `shed` (dropped
    under overload) and `abandoned` (closed without draining); `refused` ones were never accepted. A
    request that is split counts once in `accepted` and once a part afterwards. `ended_rows` are the
    rows of those that were refused or ended without an answer, by these names.

    `batch_rows` maps a batch's rows to how many such batches ran, `close_reasons` why they left.
    Of `predictions` batches it was predicted how long they take until they are answered:
    `predicted_time_sum` in all, `actual_time_sum` they took, and `prediction_error_sum` is the sum
    of the differences' sizes. `sizes` is of this moment; `buckets` says what is queued in each
    bucket and what was learned of it, `returners` what of callers that come back. `warnings` name
    limits that get in each other's way.

    Of the rows that ran in padded batches, `positions` sums the lengths along the padded axis
    that the requests had, `padding_positions` those that padding added.
    """

    accepted: int
    refused: int
    answered: int
    failed: int
    cancelled: int
    expired: int
    shed: int
    abandoned: int
    batches: int
    failed_batches: int
    rows: int
    batch_rows: Mapping[int, int]
    close_reasons: Mapping[CloseReason, int]
    queue_delay_sum: float
    compute_time_sum: float
    sizes: QueueSizes
    ended_rows: Mapping[str, int]
    predictions: int
    predicted_time_sum: float
    actual_time_sum: float
    prediction_error_sum: float
    buckets: Mapping[Hashable, BucketStatistics]
    returners: ReturnersStatistics
    warnings: Sequence[str]
    positions: int
    padding_positions: int

    @property
    def padding_waste(self) -> float:
        """The share of padding in the padded inputs, from 0 to 1; 0 when nothing was padded."""
        total = self.positions + self.padding_positions
        return self.padding_positions / total if total else 0.0


class Ledger:
    """Counts what happens in a batcher. Thread-safe."""

    def __init__(self) -> None:
        # Guards every field below; held for a few additions, nothing is called.
        self._lock = threading.Lock()
        self._answered = 0
        self._batches = 0
        self._run_rows = 0
        self._counts: Counter[str] = Counter()
        self._batch_rows: Counter[int] = Counter()
        self._reasons: Counter[CloseReason] = Counter()
        self._queue_delay_sum = 0.0
        self._compute_time_sum = 0.0
        self._rows: Counter[str] = Counter()
        self._predictions = 0
        self._predicted_time_sum = 0.0
        self._actual_time_sum = 0.0
        self._prediction_error_sum = 0.0

    def refused(self, rows: int) -> None:
        """A request of so many rows was not accepted."""
        self._count("refused", rows)

    def answered(self, requests: int, queue_delay_sum: float) -> None:
        """So many requests got their results, after so many seconds in the queue all together."""
        with self._lock:
            self._answered += requests
            self._queue_delay_sum += queue_delay_sum

    def failed(self, error: BaseException, rows: int) -> None:
        """An accepted request of so many rows ended with this error."""
        if isinstance(error, Cancelled):
            self._count("cancelled", rows)
        elif isinstance(error, DeadlineExceeded):
            self._count("expired", rows)
        elif isinstance(error, Shed):
            self._count("shed", rows)
        elif isinstance(error, BatcherClosed):
            self._count("abandoned", rows)
        else:
            self._count("failed", rows)

    def ran(self, rows: int, compute_time: float, reason: CloseReason | None) -> int:
        """A batch of so many rows ran for `compute_time` seconds; returns its running number, from 1.

        `reason` is why it left; None for one that is a part of another.
        """
        with self._lock:
            if reason is not None:
                self._reasons[reason] += 1
            self._run_rows += rows
            self._batch_rows[rows] += 1
            self._compute_time_sum += compute_time
            self._batches += 1
            return self._batches

    def failed_to_run(self, reason: CloseReason | None) -> None:
        """A batch failed, whose requests run again in smaller ones or fail with it; `reason` as in `ran`."""
        with self._lock:
            if reason is not None:
                self._reasons[reason] += 1
            self._counts["failed_batches"] += 1

    def padded(self, batch: Sequence[Request], padded_length: int) -> None:
        """A batch ran with its requests' rows padded to this length."""
        rows = sum(request.rows for request in batch)
        positions = sum(request.rows * request.padding.length for request in batch if request.padding)
        with self._lock:
            self._counts["positions"] += positions
            self._counts["padding_positions"] += rows * padded_length - positions

    def predicted(self, predicted: float, actual: float) -> None:
        """A batch was answered after `actual` seconds, of which `predicted` had been predicted."""
        with self._lock:
            self._predictions += 1
            self._predicted_time_sum += predicted
            self._actual_time_sum += actual
            self._prediction_error_sum += abs(actual - predicted)

    def _count(self, name: str, rows: int = 0) -> None:
        with self._lock:
            self._counts[name] += 1
            if rows:
                self._rows[name] += rows

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
            counts = self._counts
            return BatcherStatistics(
                accepted=accepted,
                refused=counts["refused"],
                answered=self._answered,
                failed=counts["failed"],
                cancelled=counts["cancelled"],
                expired=counts["expired"],
                shed=counts["shed"],
                abandoned=counts["abandoned"],
                batches=self._batches,
                failed_batches=counts["failed_batches"],
                rows=self._run_rows,
                batch_rows=dict(self._batch_rows),
                close_reasons=dict(self._reasons),
                queue_delay_sum=self._queue_delay_sum,
                compute_time_sum=self._compute_time_sum,
                sizes=sizes,
                ended_rows=dict(self._rows),
                predictions=self._predictions,
                predicted_time_sum=self._predicted_time_sum,
                actual_time_sum=self._actual_time_sum,
                prediction_error_sum=self._prediction_error_sum,
                buckets=buckets,
                returners=returners,
                warnings=warnings,
                positions=counts["positions"],
                padding_positions=counts["padding_positions"],
            )
