"""Statistics of a pipeline as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tensorferry.batcher.learning.return_model import ReturnStatistics
from tensorferry.batcher.statistics.counters import BatcherStatistics, Counters, QueueSizes

_NOTHING = QueueSizes(0, 0, 0, 0)


def statistics_of(
    counters: Counters, accepted: int, last_run: float | None, stages: Sequence[BatcherStatistics]
) -> BatcherStatistics:
    """Return the statistics of a pipeline, of its own counters and the stages that have batchers of its own.

    Requests and their times are the pipeline's. Sizes, retries, failed batches and padding are sums over the stages. All
    else about batches is that of the last stage, and `returners` that of the first. Without such stages, a request is a batch.
    """
    whole = counters.statistics(
        accepted, _sizes([stage.sizes for stage in stages]), {}, ReturnStatistics(0.0, 0.0, 0), ()
    )
    if not stages:
        return replace(whole, last_run=last_run)
    first, last = stages[0], stages[-1]
    return replace(
        whole,
        batch_times=last.batch_times,
        close_reasons=last.close_reasons,
        last_run=last_run,
        predictions=last.predictions,
        predicted_time_sum=last.predicted_time_sum,
        actual_time_sum=last.actual_time_sum,
        prediction_error_sum=last.prediction_error_sum,
        buckets=last.buckets,
        returners=first.returners,
        failed_batches=sum(stage.failed_batches for stage in stages),
        retried=sum(stage.retried for stage in stages),
        positions=sum(stage.positions for stage in stages),
        padding_positions=sum(stage.padding_positions for stage in stages),
        warnings=[warning for stage in stages for warning in stage.warnings],
    )


def _sizes(stages: Sequence[QueueSizes]) -> QueueSizes:
    """Return the sums of what the stages have queued and running."""
    classes = [0] * max([len(sizes.class_rows) for sizes in stages], default=1)
    for sizes in stages:
        for level, rows in enumerate(sizes.class_rows):
            classes[level] += rows
    return QueueSizes(
        sum(sizes.queued for sizes in stages),
        sum(sizes.queued_rows for sizes in stages),
        sum(sizes.running for sizes in stages),
        sum(sizes.held_bytes for sizes in stages),
        tuple(classes),
    )
