"""What a monitoring system reads: every metric's name and meaning, made from statistics when it asks.

Nothing is done for a metric while requests are served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import ProcessCollector, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from tensorferry.batcher import BatcherStatistics, CloseReason
from tensorferry.server.gpus import Gpus, GpuStatistics
from tensorferry.server.models import ModelRegistry
from tensorferry.server.triton_metrics import Counted, triton_gpu_text, triton_text

# Of prometheus-client's text format, in which alone Triton's names can be what they are.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LABELS = ("model", "version")
_REFUSALS = ("queue_full", "too_large", "deadline", "closed", "invalid")
_UNANSWERED = ("failed", "cancelled", "expired", "shed", "abandoned")
# Of each GPU that serves: what of its statistics, as what, by which name.
_OF_GPUS: Sequence[tuple[str, Callable[..., Any], str, str]] = (
    (
        "utilization",
        GaugeMetricFamily,
        "utilization_ratio",
        "Share of the time in which a kernel ran, 0 to 1",
    ),
    ("memory_used_bytes", GaugeMetricFamily, "memory_used_bytes", "Memory in use, by all processes"),
    ("memory_total_bytes", GaugeMetricFamily, "memory_total_bytes", "Memory that there is"),
    ("temperature_celsius", GaugeMetricFamily, "temperature_celsius", "Temperature"),
    ("power_watts", GaugeMetricFamily, "power_watts", "Power that is drawn"),
    ("power_limit_watts", GaugeMetricFamily, "power_limit_watts", "Power that may be drawn"),
    ("energy_joules", CounterMetricFamily, "energy_joules", "Energy drawn since the first look"),
)


class Metrics:
    """All metrics of a server; `gpus` gives what tells of its GPUs, if anything does. Thread-safe."""

    def __init__(self, registry: ModelRegistry, gpus: Callable[[], Gpus | None] = lambda: None) -> None:
        self._registry = registry
        self._gpus = gpus
        # Of this process alone, not of those that some other code may register.
        self._process = ProcessCollector(registry=None)

    def page(self) -> bytes:
        """What is there now, in Prometheus' text format: one moment's figures for each model."""
        models = self._registry.models()
        counted = [(model, model.batcher.statistics()) for model in models]
        ours = generate_latest(_Collected(families(counted)))
        process = generate_latest(_Collected(self._process.collect()))
        reader = self._gpus()
        devices = sorted({device for model in models for device in model.devices})
        gpus = reader.statistics(devices) if reader is not None else ()
        ours += generate_latest(_Collected(gpu_families(gpus)))
        return ours + (triton_text(counted) + triton_gpu_text(gpus)).encode() + process


class _Collected:
    """What was collected, in the form in which prometheus-client takes it."""

    def __init__(self, collected: Iterable[Metric]) -> None:
        self._collected = collected

    def collect(self) -> Iterable[Metric]:
        return self._collected


def families(counted: Sequence[Counted]) -> Sequence[Metric]:
    """Our own metrics of these models."""
    every = _families()
    for model, counts in counted:
        of = (model.name, model.version)
        for name, values in _values(counts).items():
            for further, value in values.items():
                every[name].add_metric((*of, *further), value)
        every["tensorferry_batch_rows"].add_metric(
            of, _buckets(counts.batch_rows, model.max_batch_size), counts.rows
        )
    return list(every.values())


def gpu_families(gpus: Sequence[GpuStatistics]) -> Sequence[Metric]:
    """Our own metrics of the GPUs; none where there are no GPUs, and without those that none of them tells."""
    labels = ("device", "gpu_uuid")
    made: list[Metric] = []
    for field, kind, name, help in _OF_GPUS:
        family = kind(f"tensorferry_gpu_{name}", help, labels=labels)
        for gpu in gpus:
            if (value := getattr(gpu, field)) is not None:
                family.add_metric((gpu.device, gpu.uuid), value)
        if family.samples:
            made.append(family)
    return made


def _families() -> dict[str, Any]:
    """An empty family for each metric, by its name. Any: their `add_metric` differ."""
    made: list[Metric] = [
        _counter("requests_accepted", "Requests that the queue took in"),
        _counter("requests", "Accepted requests that have ended, by how", "outcome"),
        _counter("requests_retried", "Accepted requests that were queued again, since their device failed"),
        _counter("requests_refused", "Requests that were not accepted, by reason", "reason"),
        _counter("rows_unanswered", "Rows of requests that got no answer, by what became of them", "outcome"),
        _counter(
            "request_seconds",
            "Time from arrival to answer, summed over the answered requests, by stage",
            "stage",
        ),
        _counter(
            "unanswered_seconds", "Time from arrival to end, summed over accepted requests without an answer"
        ),
        HistogramMetricFamily(
            "tensorferry_batch_rows", "Rows of the batches that ran, padding not counted", labels=_LABELS
        ),
        _counter("batch_seconds", "Time of the batches that ran, by stage; compute: the model ran", "stage"),
        _counter("batches_left", "Batches that left the queue, by why they did then", "reason"),
        _counter("batches_failed", "Batches, or halves of such, for which the model raised"),
        _counter("batches_predicted", "Answered batches whose time had been predicted"),
        _counter("batch_predicted_seconds", "Time that these batches should have taken until answered"),
        _counter("batch_actual_seconds", "Time that these batches took until answered"),
        _counter("batch_prediction_error_seconds", "The differences between both, each counted as positive"),
        _counter(
            "padded_positions", "Positions along the padded axis in rows that ran in padded batches", "kind"
        ),
        _gauge("queued_requests", "Requests that wait; a part of one that was cut counts as one"),
        _gauge("queued_rows", "Rows that wait, by priority class, 1 the highest", "priority"),
        _gauge("running_requests", "Requests whose batch has left and that are not answered"),
        _gauge("held_bytes", "Bytes of the requests that wait or run"),
    ]
    return {_name_of(family): family for family in made}


def _values(counts: BatcherStatistics) -> Mapping[str, Mapping[tuple[str, ...], float]]:
    """The values by further labels, by metric."""
    times, sizes, batch_times = counts.answer_times, counts.sizes, counts.batch_times.values()
    return {
        "tensorferry_requests_accepted_total": {(): counts.accepted},
        "tensorferry_requests_total": {
            (outcome,): getattr(counts, outcome) for outcome in ("answered", *_UNANSWERED)
        },
        "tensorferry_requests_retried_total": {(): counts.retried},
        "tensorferry_requests_refused_total": {
            (reason,): counts.refusals.get(reason, 0) for reason in _REFUSALS
        },
        "tensorferry_rows_unanswered_total": {
            (outcome,): counts.ended_rows.get(outcome, 0) for outcome in ("refused", *_UNANSWERED)
        },
        "tensorferry_request_seconds_total": {
            ("queue",): times.queue_delay_sum,
            ("input",): times.input_time_sum,
            ("compute",): times.compute_time_sum,
            ("output",): times.output_time_sum,
        },
        "tensorferry_unanswered_seconds_total": {(): counts.unanswered_time_sum},
        "tensorferry_batch_seconds_total": {
            ("input",): sum(one.input_time_sum for one in batch_times),
            ("compute",): counts.compute_time_sum,
            ("output",): sum(one.output_time_sum for one in batch_times),
        },
        "tensorferry_batches_left_total": {
            (reason.value,): counts.close_reasons.get(reason, 0) for reason in CloseReason
        },
        "tensorferry_batches_failed_total": {(): counts.failed_batches},
        "tensorferry_batches_predicted_total": {(): counts.predictions},
        "tensorferry_batch_predicted_seconds_total": {(): counts.predicted_time_sum},
        "tensorferry_batch_actual_seconds_total": {(): counts.actual_time_sum},
        "tensorferry_batch_prediction_error_seconds_total": {(): counts.prediction_error_sum},
        "tensorferry_padded_positions_total": {
            ("content",): counts.positions,
            ("padding",): counts.padding_positions,
        },
        "tensorferry_queued_requests": {(): sizes.queued},
        "tensorferry_queued_rows": {
            (str(priority),): rows for priority, rows in enumerate(sizes.class_rows, start=1)
        },
        "tensorferry_running_requests": {(): sizes.running},
        "tensorferry_held_bytes": {(): sizes.held_bytes},
    }


def _counter(name: str, help: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"tensorferry_{name}", help, labels=(*_LABELS, *labels))


def _gauge(name: str, help: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"tensorferry_{name}", help, labels=(*_LABELS, *labels))


def _name_of(family: Metric) -> str:
    """As it stands on the page."""
    return f"{family.name}_total" if family.type == "counter" else family.name


def _buckets(batch_rows: Mapping[int, int], most: int) -> Sequence[tuple[str, float]]:
    """How many batches had at most so many rows, for each power of two up to the most, and that."""
    return [
        (str(bound), sum(batches for rows, batches in batch_rows.items() if rows <= bound))
        for bound in _bounds(max(1, most))
    ] + [("+Inf", sum(batch_rows.values()))]


def _bounds(most: int) -> Iterator[int]:
    bound = 1
    while bound < most:
        yield bound
        bound *= 2
    yield most
