"""Statistics of a model, as plain records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tensorferry.protos import inference_pb2 as pb


@dataclass(frozen=True, slots=True)
class Times:
    """Number of events, and their total time in seconds.

    >>> Times(count=4, seconds=0.002).mean
    0.0005
    """

    count: int
    seconds: float

    @property
    def mean(self) -> float:
        """Mean time in seconds; 0 without events.

        >>> Times(count=0, seconds=0.0).mean
        0.0
        """
        return self.seconds / self.count if self.count else 0.0

    @classmethod
    def from_message(cls, message: pb.StatisticDuration) -> Times:
        """Convert a `StatisticDuration`."""
        return cls(message.count, message.ns / 1e9)


@dataclass(frozen=True, slots=True)
class BatchStatistics:
    """Times of all batches of one size in rows.

    >>> client.statistics("digits")[0].batches[0].rows
    1
    """

    rows: int
    compute_input: Times
    compute_infer: Times
    compute_output: Times


@dataclass(frozen=True, slots=True)
class ModelStatistics:
    """Counts and times of one model version since it was loaded.

    `last_inference` is the time of the last batch in seconds since 1970, or None. `rows` and
    `executions` count rows and batches that were run. `success` and `failure` are requests from
    arrival to answer. `queue`, `compute_input`, `compute_infer` and `compute_output` are stages of
    the answered requests. `batches` has the times by batch size, the smallest first.

    >>> [statistics] = client.statistics("digits")
    >>> statistics.rows >= statistics.executions > 0
    True
    """

    name: str
    version: str
    last_inference: float | None
    rows: int
    executions: int
    success: Times
    failure: Times
    queue: Times
    compute_input: Times
    compute_infer: Times
    compute_output: Times
    cache_hit: Times
    cache_miss: Times
    batches: Sequence[BatchStatistics]

    @classmethod
    def from_message(cls, message: pb.ModelStatisticsResponse) -> tuple[ModelStatistics, ...]:
        """Convert a `ModelStatisticsResponse`, in the server's order."""
        return tuple(cls._of_model(one) for one in message.model_stats)

    @classmethod
    def _of_model(cls, message: pb.ModelStatistics) -> ModelStatistics:
        times = message.inference_stats
        return cls(
            name=message.name,
            version=message.version,
            last_inference=message.last_inference / 1e3 or None,
            rows=message.inference_count,
            executions=message.execution_count,
            success=Times.from_message(times.success),
            failure=Times.from_message(times.fail),
            queue=Times.from_message(times.queue),
            compute_input=Times.from_message(times.compute_input),
            compute_infer=Times.from_message(times.compute_infer),
            compute_output=Times.from_message(times.compute_output),
            cache_hit=Times.from_message(times.cache_hit),
            cache_miss=Times.from_message(times.cache_miss),
            batches=tuple(
                BatchStatistics(
                    batch.batch_size,
                    Times.from_message(batch.compute_input),
                    Times.from_message(batch.compute_infer),
                    Times.from_message(batch.compute_output),
                )
                for batch in sorted(message.batch_stats, key=lambda batch: batch.batch_size)
            ),
        )
