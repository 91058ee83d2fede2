"""Metrics of the steps of models, and of the stages of pipelines."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client.metrics_core import Metric

from tensorferry.server.monitoring.metric_families import empty_families, row_buckets, time_buckets
from tensorferry.server.monitoring.metric_names import MODEL_LABELS, StepMetric
from tensorferry.server.monitoring.step_statistics import ModelCounts

_OUTCOMES = ("answered", "failed", "cancelled", "expired", "shed", "abandoned", "refused")


def step_families(counted: Sequence[ModelCounts]) -> Sequence[Metric]:
    """Return the metrics of the steps and stages of these models, without those that none has."""
    found = empty_families(StepMetric, MODEL_LABELS)
    for one in counted:
        of = (one.model.name, one.model.version)
        # A pipeline may have several steps of one name.
        batches, seconds = dict[str, int](), dict[str, float]()
        for counts in one.steps():
            step = counts.step.name
            batches[step] = batches.get(step, 0) + counts.batches
            seconds[step] = seconds.get(step, 0.0) + counts.seconds
        for step, ran in batches.items():
            found[StepMetric.STEP_BATCHES].add_metric((*of, step), ran)
            found[StepMetric.STEP_SECONDS].add_metric((*of, step), seconds[step])
        for stage in one.stages:
            name, ended = (*of, stage.name), stage.counts
            for outcome in _OUTCOMES:
                found[StepMetric.STAGE_REQUESTS].add_metric(
                    (*of, outcome, stage.name), getattr(ended, outcome)
                )
            found[StepMetric.STAGE_REQUEST_SECONDS].add_metric(name, ended.answer_times.total_sum)
            delays, rows = ended.queue_delays, stage.settings.max_batch_size
            found[StepMetric.STAGE_QUEUE_DELAY].add_metric(name, time_buckets(delays), delays.sum)
            found[StepMetric.STAGE_BATCH_ROWS].add_metric(
                name, row_buckets(ended.batch_rows, rows), ended.rows
            )
            found[StepMetric.STAGE_QUEUED_ROWS].add_metric(name, ended.sizes.queued_rows)
    return [family for family in found.values() if family.samples]
