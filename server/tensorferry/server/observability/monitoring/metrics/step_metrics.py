"""Metrics of the steps of models, and of the stages of pipelines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from prometheus_client.metrics_core import Metric

from tensorferry.server.models.lifecycle.registry import ModelStep
from tensorferry.server.observability.monitoring.metrics.metric_families import (
    empty_families,
    row_buckets,
    time_buckets,
)
from tensorferry.server.observability.monitoring.metrics.metric_names import (
    MODEL_LABELS,
    OUTCOMES,
    StepMetric,
)
from tensorferry.server.observability.monitoring.processes import resident_bytes
from tensorferry.server.observability.monitoring.step_statistics import ModelCounts
from tensorferry.server.processes.functions.worker_process import WorkerProcess


def step_families(counted: Sequence[ModelCounts]) -> Sequence[Metric]:
    """Return the metrics of the steps and stages of these models, without those that none has."""
    found = empty_families(StepMetric, MODEL_LABELS)
    for one in counted:
        of = (one.model.name, one.model.version)
        # A pipeline may have several steps of one name.
        batches, seconds = defaultdict[str, int](int), defaultdict[str, float](float)
        for counts in one.steps():
            batches[counts.step.name] += counts.batches
            seconds[counts.step.name] += counts.seconds
        for step, ran in batches.items():
            found[StepMetric.STEP_BATCHES].add_metric((*of, step), ran)
            found[StepMetric.STEP_SECONDS].add_metric((*of, step), seconds[step])
        for step, processes in _processes(one.model.steps).items():
            pids = [pid for process in processes if (pid := process.pid) is not None]
            name = (*of, step)
            found[StepMetric.STEP_PROCESSES].add_metric(name, len(pids))
            found[StepMetric.STEP_RESTARTS].add_metric(name, sum(process.restarts for process in processes))
            found[StepMetric.STEP_MEMORY].add_metric(name, sum(resident_bytes(pid) or 0 for pid in pids))
        for stage in one.stages:
            name, ended = (*of, stage.name), stage.counts
            for outcome in (*OUTCOMES, "refused"):
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


def _processes(steps: Sequence[ModelStep]) -> Mapping[str, Sequence[WorkerProcess]]:
    """Return the processes of each step that has some, by name."""
    found: dict[str, list[WorkerProcess]] = {}
    for step in steps:
        if step.processes:
            found.setdefault(step.name, []).extend(step.processes)
    return found
