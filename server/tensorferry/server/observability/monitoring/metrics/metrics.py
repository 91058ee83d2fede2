"""Metrics page, generated from statistics when it is requested.

Serving a request updates no metric. Names and help texts are in `metric_names.py`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, TypeAlias, TypeVar

import grpc
from prometheus_client import ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.samples import Exemplar as ShownExemplar

from tensorferry.batcher import BOUNDS, CloseReason, EndReason, Histogram, StatefulBatcher
from tensorferry.server.models.lifecycle.model import Model, ModelStep
from tensorferry.server.models.lifecycle.registry import ModelRegistry, ModelState, RegistryEntry
from tensorferry.server.observability.logs.exemplars import Exemplars
from tensorferry.server.observability.monitoring.metrics.metric_names import (
    GPU_LABELS,
    MODEL_LABELS,
    OUTCOMES,
    UNANSWERED,
    GpuMetric,
    MetricName,
    ModelMetric,
    ProcessMetric,
    ServerMetric,
    StepMetric,
)
from tensorferry.server.observability.monitoring.metrics.triton_metrics import triton_text
from tensorferry.server.observability.monitoring.processes import (
    ProcessStatus,
    ServerStatistics,
    resident_bytes,
)
from tensorferry.server.observability.monitoring.step_statistics import ModelCounts, counts_of
from tensorferry.server.processes.functions.worker_process import WorkerProcess
from tensorferry.server.runtime.gpu.gpu_readings import GpuReader, GpuStatistics
from tensorferry.server.runtime.recovery.instance_health import InstanceEvent

_OPENMETRICS = "application/openmetrics-text"
_END = b"# EOF\n"

_REFUSALS = ("queue_full", "too_large", "deadline", "closed", "unavailable", "cancelled", "invalid")
_PROCESS_STATES = ("starting", "serving", "waiting", "ended")
# Codes of requests that are refused before the queue. Other codes are listed once they occur.
_CODES = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.INTERNAL,
)
_KINDS: Mapping[str, Callable[..., Any]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}
_N = TypeVar("_N", bound=MetricName)
# Values by the labels in addition to those of the group.
_Values: TypeAlias = Mapping[tuple[str, ...], float]


class Metrics:
    """All metrics of a server. Thread-safe.

    `gpus` returns the reader of GPUs, if there is one, and `server` the statistics of the server.
    """

    def __init__(
        self,
        registry: ModelRegistry,
        server: Callable[[], ServerStatistics],
        gpus: Callable[[], GpuReader | None] = lambda: None,
    ) -> None:
        self._registry = registry
        self._server = server
        self._gpus = gpus
        # Unregistered, so that collectors of other code have no effect.
        self._process = ProcessCollector(registry=None)

    def page(self, accept: str = "") -> tuple[bytes, str]:
        """Return the current page and its content type. All values of a model are from one moment.

        The header Accept selects OpenMetrics, which includes exemplars, or the text format.
        """
        entries = self._registry.entries()
        models = [entry.model for entry in entries if entry.model is not None]
        counted = [counts_of(model) for model in models]
        server = self._server()
        reader = self._gpus()
        devices = sorted({device for model in models for device in model.devices})
        gpus = reader.statistics(devices) if reader is not None else ()
        encode, content_type = encoder_of(accept)
        openmetrics = content_type.startswith(_OPENMETRICS)
        families = [
            *model_families(entries, counted),
            *step_families(counted),
            *server_families(server),
            *process_families(server.processes),
            *gpu_families(gpus),
            *self._process.collect(),
        ]
        collector: Any = SimpleNamespace(collect=lambda: families)
        page: bytes = encode(collector)
        # Written without the library, which would change the names.
        triton = triton_text(counted, gpus, openmetrics=openmetrics).encode()
        if openmetrics:
            return page.removesuffix(_END) + triton + _END, content_type
        return page + triton, content_type


def encoder_of(accept: str) -> tuple[Callable[[Any], bytes], str]:
    """Return the function that writes the format which a header Accept selects, and the content type.

    The library gets no version of the client's: it fails for one that is no number, and repeats others as its own.
    """
    return choose_encoder(_OPENMETRICS if _OPENMETRICS in accept else "")


def model_families(entries: Sequence[RegistryEntry], counted: Sequence[ModelCounts]) -> Sequence[Metric]:
    """Return the metrics of these models."""
    found = _empty_families(ModelMetric, MODEL_LABELS)
    for entry in entries:
        if not entry.is_unloaded:
            ready = entry.state is ModelState.READY
            found[ModelMetric.READY].add_metric((entry.name, entry.version), float(ready))
    for one in counted:
        model, counts = one.model, one.counts
        of = (model.name, model.version)
        for metric, values in _metric_values(one).items():
            for labels, value in values.items():
                found[metric].add_metric((*of, *labels), value)
        found[ModelMetric.BATCH_ROWS].add_metric(
            of, _row_buckets(counts.batch_rows, model.max_batch_size), counts.rows
        )
        for metric, times, exemplars in (
            (ModelMetric.LATENCY, counts.latencies, model.exemplars),
            (ModelMetric.QUEUE_DELAY, counts.queue_delays, None),
            (ModelMetric.COMPUTE_TIME, counts.compute_times, None),
        ):
            found[metric].add_metric(of, _time_buckets(times, exemplars), times.sum)
    return list(found.values())


def step_families(counted: Sequence[ModelCounts]) -> Sequence[Metric]:
    """Return the metrics of the steps and stages of these models, without those that none has."""
    found = _empty_families(StepMetric, MODEL_LABELS)
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
        for step, processes in _processes_of(one.model.steps).items():
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
            found[StepMetric.STAGE_QUEUE_DELAY].add_metric(name, _time_buckets(delays), delays.sum)
            found[StepMetric.STAGE_BATCH_ROWS].add_metric(
                name, _row_buckets(ended.batch_rows, rows), ended.rows
            )
            found[StepMetric.STAGE_QUEUED_ROWS].add_metric(name, ended.sizes.queued_rows)
    return [family for family in found.values() if family.samples]


def _processes_of(steps: Sequence[ModelStep]) -> Mapping[str, Sequence[WorkerProcess]]:
    """Return the processes of each step that has some, by name."""
    found: dict[str, list[WorkerProcess]] = {}
    for step in steps:
        if step.processes:
            found.setdefault(step.name, []).extend(step.processes)
    return found


def server_families(server: ServerStatistics) -> Sequence[Metric]:
    """Return the metrics of the server as a whole."""
    found = _empty_families(ServerMetric, ())
    found[ServerMetric.INFO].add_metric((server.release, server.transport), 1)
    found[ServerMetric.READY].add_metric((), float(server.ready))
    found[ServerMetric.OPEN_STREAMS].add_metric((), server.open_streams)
    found[ServerMetric.UNSENT_BYTES].add_metric((), server.unsent_bytes)
    found[ServerMetric.CALL_THREADS].add_metric((), server.call_threads)
    found[ServerMetric.HTTP_CONNECTIONS].add_metric((), server.http_connections)
    for code in dict.fromkeys((*_CODES, *server.refused)):
        found[ServerMetric.CALLS_REFUSED].add_metric((code.name,), server.refused.get(code, 0))
    return list(found.values())


def process_families(processes: Sequence[ProcessStatus]) -> Sequence[Metric]:
    """Return the metrics of a server's processes; none if one process does all."""
    if not processes:
        return ()
    found = _empty_families(ProcessMetric, ())
    for state in _PROCESS_STATES:
        count = sum(process.state == state for process in processes)
        found[ProcessMetric.PROCESSES].add_metric((state,), count)
    found[ProcessMetric.RESTARTS].add_metric((), sum(process.restarts for process in processes))
    memory = sum(process.resident_bytes or 0 for process in processes)
    found[ProcessMetric.MEMORY].add_metric((), memory)
    return list(found.values())


def gpu_families(gpus: Sequence[GpuStatistics]) -> Sequence[Metric]:
    """Return the metrics of the GPUs, without those that no GPU supports."""
    found = _empty_families(GpuMetric, GPU_LABELS)
    for metric in GpuMetric:
        for gpu in gpus:
            if (value := getattr(gpu, metric.name.lower())) is not None:
                found[metric].add_metric((gpu.device, gpu.uuid), value)
    return [family for family in found.values() if family.samples]


def _metric_values(counted: ModelCounts) -> Mapping[ModelMetric, _Values]:
    """Return the values of all metrics except histograms."""
    counts = counted.counts
    times, sizes = counts.answer_times, counts.sizes
    # Of a pipeline, the devices of all stages.
    batch_times = [time for one in counted.of_batchers for time in one.batch_times.values()]
    health = counted.model.health.statistics()
    return {
        ModelMetric.INSTANCES: {(): health.instances},
        ModelMetric.INSTANCES_OUT: {(): health.down},
        ModelMetric.INSTANCE_EVENTS: {(event.value,): health.events.get(event, 0) for event in InstanceEvent},
        ModelMetric.ACCEPTED: {(): counts.accepted},
        ModelMetric.REQUESTS: {(outcome,): getattr(counts, outcome) for outcome in OUTCOMES},
        ModelMetric.RETRIED: {(): counts.retried},
        ModelMetric.REFUSED: {(reason,): counts.refusals.get(reason, 0) for reason in _REFUSALS},
        ModelMetric.ROWS_UNANSWERED: {
            (outcome,): counts.unanswered_rows.get(outcome, 0) for outcome in ("refused", *UNANSWERED)
        },
        ModelMetric.REQUEST_SECONDS: {
            ("queue",): times.queue_delay_sum,
            ("input",): times.input_time_sum,
            ("compute",): times.compute_time_sum,
            ("output",): times.output_time_sum,
        },
        ModelMetric.UNANSWERED_SECONDS: {(): counts.unanswered_time_sum},
        ModelMetric.BATCH_SECONDS: {
            ("input",): sum(one.input_time_sum for one in batch_times),
            ("compute",): sum(one.compute_time_sum for one in batch_times),
            ("output",): sum(one.output_time_sum for one in batch_times),
        },
        ModelMetric.BATCHES_LEFT: {
            (reason.value,): counts.close_reasons.get(reason, 0) for reason in CloseReason
        },
        ModelMetric.BATCHES_FAILED: {(): counts.failed_batches},
        ModelMetric.BATCHES_PREDICTED: {(): counts.predictions},
        ModelMetric.PREDICTED_SECONDS: {(): counts.predicted_time_sum},
        ModelMetric.ACTUAL_SECONDS: {(): counts.actual_time_sum},
        ModelMetric.PREDICTION_ERROR: {(): counts.prediction_error_sum},
        ModelMetric.PADDED_POSITIONS: {
            ("content",): counts.positions,
            ("padding",): counts.padding_positions,
        },
        ModelMetric.QUEUED: {(): sizes.queued},
        ModelMetric.QUEUED_ROWS: {
            (str(priority),): rows for priority, rows in enumerate(sizes.class_rows, start=1)
        },
        ModelMetric.QUEUED_BUCKETS: {(): sum(bucket.queued > 0 for bucket in counts.buckets.values())},
        ModelMetric.FULL_BATCH_ROWS: {
            (): counts.full_batch_rows or counted.model.batcher.settings.max_batch_size
        },
        ModelMetric.RUNNING: {(): sizes.running},
        ModelMetric.HELD_BYTES: {(): sizes.held_bytes},
        **_sequence_values(counted.model),
        **_cache_values(counted.model),
    }


def _cache_values(model: Model) -> Mapping[ModelMetric, _Values]:
    if model.cache is None:
        return {}
    found = model.cache.statistics()
    return {
        ModelMetric.CACHE_HITS: {(): found.hits},
        ModelMetric.CACHE_MISSES: {(): found.misses},
        ModelMetric.CACHE_BYTES: {(): found.nbytes},
    }


def _sequence_values(model: Model) -> Mapping[ModelMetric, _Values]:
    if not isinstance(model.batcher, StatefulBatcher):
        return {}
    found = model.batcher.sequence_statistics()
    return {
        ModelMetric.SEQUENCES: {(): found.living},
        ModelMetric.SEQUENCES_STARTED: {(): found.started},
        ModelMetric.SEQUENCES_ENDED: {(reason.value,): found.ended.get(reason, 0) for reason in EndReason},
        ModelMetric.STATE_BYTES: {(): found.state_bytes},
    }


def _empty_families(group: type[_N], labels: tuple[str, ...]) -> dict[_N, Any]:
    """Return an empty family for each metric of a group. The type is Any, because `add_metric` differs."""
    return {
        metric: _KINDS[metric.type](metric.family, metric.meaning, labels=(*labels, *metric.labels))
        for metric in group
    }


def _time_buckets(times: Histogram, exemplars: Exemplars | None = None) -> Sequence[Sequence[Any]]:
    """Return cumulative counts for each bound, with an exemplar of the interval if there is one."""
    latest = exemplars.latest() if exemplars is not None else (None,) * len(times.counts)
    made: list[Sequence[Any]] = []
    count = 0
    for bound, more, exemplar in zip((*BOUNDS, math.inf), times.counts, latest, strict=True):
        count += more
        written = exemplar and ShownExemplar({"trace_id": exemplar.trace_id}, exemplar.seconds, exemplar.at)
        made.append((_le(bound), count, written))
    return made


def _row_buckets(batch_rows: Mapping[int, int], max_rows: int) -> Sequence[tuple[str, float]]:
    """Return cumulative counts of batches by rows, for powers of two up to `max_rows`."""
    return [
        (_le(bound), sum(batches for rows, batches in batch_rows.items() if rows <= bound))
        for bound in _row_bounds(max(1, max_rows))
    ] + [("+Inf", sum(batch_rows.values()))]


def _le(bound: float) -> str:
    """Return a bound as OpenMetrics writes it, in both formats, because it is part of the series' name."""
    return "+Inf" if math.isinf(bound) else str(float(bound))


def _row_bounds(max_rows: int) -> Iterator[int]:
    bound = 1
    while bound < max_rows:
        yield bound
        bound *= 2
    yield max_rows
