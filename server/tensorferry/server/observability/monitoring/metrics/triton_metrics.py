"""Triton's metrics under its names, so that dashboards and autoscalers for Triton keep working.

The text is written here, because prometheus-client would append `_total` to the counters. In OpenMetrics a counter
without `_total` is invalid, so these metrics have the type unknown there. Names and values are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from tensorferry.batcher import BatcherStatistics, CacheStatistics
from tensorferry.server.models.lifecycle.failure_counts import failures_by_reason
from tensorferry.server.models.lifecycle.registry import Model
from tensorferry.server.runtime.gpu.gpu_readings import GpuStatistics

# Values by the labels in addition to those of the model. Most metrics have none.
_Values: TypeAlias = Mapping[tuple[tuple[str, str], ...], int]

# Model version and the statistics of its batcher.
Counted: TypeAlias = tuple[Model, BatcherStatistics]


class TritonMetric(NamedTuple):
    """Metric of Triton, and the function for its values."""

    name: str
    type: str
    help: str
    values: Callable[[BatcherStatistics], _Values]


def _single_value(value: Callable[[BatcherStatistics], int]) -> Callable[[BatcherStatistics], _Values]:
    return lambda counts: {(): value(counts)}


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


TRITON_METRICS: Sequence[TritonMetric] = (
    TritonMetric(
        "nv_inference_request_success",
        "counter",
        "Requests answered",
        _single_value(lambda counts: counts.answered),
    ),
    TritonMetric(
        "nv_inference_request_failure",
        "counter",
        "Requests without an answer, by reason",
        lambda counts: {(("reason", reason),): count for reason, count in failures_by_reason(counts).items()},
    ),
    TritonMetric("nv_inference_count", "counter", "Rows run", _single_value(lambda counts: counts.rows)),
    TritonMetric(
        "nv_inference_exec_count", "counter", "Batches run", _single_value(lambda counts: counts.batches)
    ),
    TritonMetric(
        "nv_inference_request_duration_us",
        "counter",
        "Microseconds from arrival to answer, summed over the answered requests",
        _single_value(lambda counts: _us(counts.answer_times.total_sum)),
    ),
    TritonMetric(
        "nv_inference_queue_duration_us",
        "counter",
        "Microseconds in the queue, summed over the answered requests",
        _single_value(lambda counts: _us(counts.answer_times.queue_delay_sum)),
    ),
    TritonMetric(
        "nv_inference_compute_input_duration_us",
        "counter",
        "Microseconds of joining batches, summed over the answered requests",
        _single_value(lambda counts: _us(counts.answer_times.input_time_sum)),
    ),
    TritonMetric(
        "nv_inference_compute_infer_duration_us",
        "counter",
        "Microseconds of running the model, summed over the answered requests",
        _single_value(lambda counts: _us(counts.answer_times.compute_time_sum)),
    ),
    TritonMetric(
        "nv_inference_compute_output_duration_us",
        "counter",
        "Microseconds of splitting outputs, summed over the answered requests",
        _single_value(lambda counts: _us(counts.answer_times.output_time_sum)),
    ),
    TritonMetric(
        "nv_inference_pending_request_count",
        "gauge",
        "Accepted requests that do not run yet",
        _single_value(lambda counts: counts.sizes.queued),
    ),
)


# Name, help text and value of each metric of models with a cache.
_CACHE_METRICS: Sequence[tuple[str, str, Callable[[CacheStatistics], int]]] = (
    ("nv_cache_num_hits_per_model", "Requests answered by the cache", lambda found: found.hits),
    ("nv_cache_num_misses_per_model", "Requests that were run", lambda found: found.misses),
    (
        "nv_cache_hit_duration_per_model",
        "Microseconds of looking up answered requests",
        lambda found: _us(found.hit_seconds),
    ),
    (
        "nv_cache_miss_duration_per_model",
        "Microseconds of looking up, and keeping, the answers of other requests",
        lambda found: _us(found.miss_seconds),
    ),
)


def triton_text(counted: Sequence[Counted], openmetrics: bool = False) -> str:
    """Return the metrics of these models in Prometheus' text format or OpenMetrics."""
    return "".join(_lines(counted, openmetrics))


def _head(name: str, type: str, help: str, openmetrics: bool) -> str:
    written_type = "unknown" if openmetrics and type == "counter" else type
    return f"# HELP {name} {help}\n# TYPE {name} {written_type}\n"


def _lines(counted: Sequence[Counted], openmetrics: bool) -> Iterable[str]:
    for metric in TRITON_METRICS:
        yield _head(metric.name, metric.type, metric.help, openmetrics)
        for model, counts in counted:
            for labels_of_value, value in metric.values(counts).items():
                labels = sorted((("model", model.name), ("version", model.version), *labels_of_value))
                # Model names contain no characters that need escaping.
                pairs = ",".join([f'{label}="{text}"' for label, text in labels])
                yield f"{metric.name}{{{pairs}}} {value}\n"
    caches = [(model, model.cache.statistics()) for model, _ in counted if model.cache is not None]
    for name, help, value_of in _CACHE_METRICS if caches else ():
        yield _head(name, "counter", help, openmetrics)
        for model, found in caches:
            yield f'{name}{{model="{model.name}",version="{model.version}"}} {value_of(found)}\n'


# Attribute of GpuStatistics, metric name, type and help text.
TRITON_GPU_METRICS: Sequence[tuple[str, str, str, str]] = (
    ("utilization", "nv_gpu_utilization", "gauge", "Share of the time in which a kernel ran, 0 to 1"),
    ("memory_total_bytes", "nv_gpu_memory_total_bytes", "gauge", "Total memory"),
    ("memory_used_bytes", "nv_gpu_memory_used_bytes", "gauge", "Memory in use by all processes"),
    ("power_watts", "nv_gpu_power_usage", "gauge", "Power draw, in watts"),
    ("power_limit_watts", "nv_gpu_power_limit", "gauge", "Power limit, in watts"),
    ("energy_joules", "nv_energy_consumption", "counter", "Energy in joules since the first reading"),
)


def triton_gpu_text(gpus: Sequence[GpuStatistics], openmetrics: bool = False) -> str:
    """Return the metrics of these GPUs in the same format, without those that no GPU supports."""
    lines = []
    for field, name, type, help in TRITON_GPU_METRICS:
        values = [(gpu.uuid, getattr(gpu, field)) for gpu in gpus]
        samples = [f'{name}{{gpu_uuid="{uuid}"}} {value}\n' for uuid, value in values if value is not None]
        if samples:
            lines += [_head(name, type, help, openmetrics), *samples]
    return "".join(lines)
