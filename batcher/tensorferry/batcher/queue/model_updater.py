"""Learning from batches that ran: computed outside the queue's lock, published inside it."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from tensorferry.batcher.clock import Clock
from tensorferry.batcher.learning.cost_model import BatchCostModel, BucketStatistics
from tensorferry.batcher.learning.memory_limit import MemoryRowLimits
from tensorferry.batcher.learning.return_model import ReturnHistogram, ReturnModel, ReturnStatistics
from tensorferry.batcher.queue.backlog import Backlog
from tensorferry.batcher.request import Request


class PendingUpdate(NamedTuple):
    """Observations to learn from a batch of `rows` rows: its cost, and the clients that returned before it.

    Either is None if there is nothing to learn. The device took `seconds`, the host `before` and `after` them.
    """

    cost_model: BatchCostModel | None
    rows: int
    seconds: float
    before: float
    after: float
    answers: ReturnHistogram | None
    now: float


class ModelUpdater:
    """Updates the learned models. Every method without `_locked` is thread-safe; `lock` is the queue's.

    Learning takes longer than anything else that is done for a batch. So what is to be learned is collected under the lock,
    the update computed while only `_learning` is held, and published under the lock.
    """

    def __init__(
        self,
        lock: threading.Lock,
        clock: Clock,
        backlog: Backlog,
        row_limits: MemoryRowLimits,
        returns: ReturnModel,
    ) -> None:
        # Guards the models as published, with all else of the queue.
        self._lock = lock
        # Guards what the models compute updates from. Taken before the other lock, never while that is held.
        self._learning = threading.Lock()
        self._clock = clock
        self._backlog = backlog
        self._row_limits = row_limits
        self._returns = returns

    def add_warmup_sample(self, rows: int, seconds: float, key: Hashable = None) -> None:
        """Give the cost model of one bucket, or of every bucket, the duration of a warm-up run of `rows` rows."""
        with self._learning, self._lock:
            self._backlog.add_warmup_sample(rows, seconds, key)

    def collect_locked(
        self,
        batch: Sequence[Request],
        seconds: float | None,
        before: float,
        after: float,
        device: int,
        now: float,
    ) -> PendingUpdate | None:
        """Return what is to be learned from a batch; mostly None. The arguments are those of `batch_done`."""
        cost_model: BatchCostModel | None = None
        rows = 0
        if seconds is not None:
            for request in batch:
                rows += request.rows_counted
            if self._row_limits.needed:
                self._row_limits.record_success(device, batch[0].key, rows)
            bucket = self._backlog.all_buckets.get(batch[0].key)
            if bucket is not None and bucket.cost_model.should_learn(now, rows, seconds + before + after):
                cost_model = bucket.cost_model
        answers = self._returns.snapshot
        if cost_model is None and answers is None:
            return None
        return PendingUpdate(cost_model, rows, seconds or 0.0, before, after, answers, now)

    def update(self, pending: PendingUpdate) -> None:
        """Compute an update without the queue's lock, and use it for all predictions from now on."""
        cost_model, answers = pending.cost_model, pending.answers
        with self._learning:
            cost = returns = None
            if cost_model is not None:
                cost = cost_model.learn(pending.rows, pending.seconds, pending.before, pending.after)
            if answers is not None:
                returns = answers.return_cdf()
            with self._lock:
                if cost_model is not None and cost is not None:
                    cost_model.publish(cost, pending.now)
                if answers is not None and returns is not None:
                    self._returns.publish(answers, returns)

    def record_oom(self, batch: Sequence[Request], device: int) -> None:
        """Learn that a batch, or a part of one, did not fit into a device's memory."""
        rows = sum([request.rows_counted for request in batch])
        with self._lock:
            self._row_limits.record_oom(device, batch[0].key, rows, self._clock.now())

    def record_success(self, batch: Sequence[Request], device: int, seconds: float) -> None:
        """Learn that a part of a batch that had not fit into memory ran, and took `seconds`."""
        rows = sum([request.rows_counted for request in batch])
        with self._learning, self._lock:
            self._row_limits.record_success(device, batch[0].key, rows)
            self._backlog.bucket(batch[0].key).cost_model.observe(self._clock.now(), rows, seconds)

    @property
    def memory_limited(self) -> bool:
        """Return whether a batch did not fit into a device's memory lately."""
        return self._row_limits.needed

    def rows_that_fit(self, device: int, key: Hashable) -> int:
        """Return the most rows of a bucket's batch that are known to fit into a device's memory."""
        with self._lock:
            return self._row_limits.rows(device, key)

    def full_rows(self, key: Hashable) -> int:
        """Return the rows of a full batch of a bucket: those that pay, or fewer if they do not fit into each device's memory."""
        with self._lock:
            bucket, fit = self._backlog.all_buckets.get(key), self._row_limits.rows_of_all(key)
            return fit if bucket is None else min(fit, bucket.full_rows)

    def least_time(self, rows: int) -> float:
        """Return the shortest time of a batch of one request of `rows` rows, in seconds; 0 if no recent one is known."""
        with self._lock:
            return self._backlog.least_time(rows, self._clock.now())

    def statistics(self) -> tuple[Mapping[Hashable, BucketStatistics], ReturnStatistics]:
        """Return what is known of each bucket, and of returning clients."""
        with self._learning, self._lock:
            return self._backlog.statistics(), self._returns.statistics()
