"""Triton's metrics under its names, so that dashboards and autoscalers for Triton keep working.

The text is written here, because prometheus-client would append `_total` to the counters. In OpenMetrics a counter
without `_total` is invalid, so these metrics have the type unknown there. Names and values are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

from tensorferry.batcher import BatcherStatistics, CacheStatistics
from tensorferry.server.models.lifecycle.failure_counts import failures_by_reason
from tensorferry.server.observability.monitoring.step_statistics import ModelCounts
from tensorferry.server.runtime.gpu.gpu_readings import GpuStatistics

# Name, type, help text, and values by their labels.
_Metric: TypeAlias = tuple[str, str, str, Sequence[tuple[Mapping[str, str], float]]]

# Name, type, help text and value of each metric that a model has once.
_MODEL_METRICS: Sequence[tuple[str, str, str, Callable[[BatcherStatistics], int]]] = (
    ("nv_inference_request_success", "counter", "Requests answered", lambda counts: counts.answered),
    ("nv_inference_count", "counter", "Rows run", lambda counts: counts.rows),
    ("nv_inference_exec_count", "counter", "Batches run", lambda counts: counts.batches),
    (
        "nv_inference_pending_request_count",
        "gauge",
        "Accepted requests that do not run yet",
        lambda counts: counts.sizes.queued,
    ),
)

# Name of each metric with a time of the answered requests, what it is, and its attribute of their times.
_TIME_METRICS: Sequence[tuple[str, str, str]] = (
    ("nv_inference_request_duration_us", "from arrival to answer", "total_sum"),
    ("nv_inference_queue_duration_us", "in the queue", "queue_delay_sum"),
    ("nv_inference_compute_input_duration_us", "of joining batches", "input_time_sum"),
    ("nv_inference_compute_infer_duration_us", "of running the model", "compute_time_sum"),
    ("nv_inference_compute_output_duration_us", "of splitting outputs", "output_time_sum"),
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

# Attribute of GpuStatistics, metric name, type and help text.
_GPU_METRICS: Sequence[tuple[str, str, str, str]] = (
    ("utilization", "nv_gpu_utilization", "gauge", "Share of the time in which a kernel ran, 0 to 1"),
    ("memory_total_bytes", "nv_gpu_memory_total_bytes", "gauge", "Total memory"),
    ("memory_used_bytes", "nv_gpu_memory_used_bytes", "gauge", "Memory in use by all processes"),
    ("power_watts", "nv_gpu_power_usage", "gauge", "Power draw, in watts"),
    ("power_limit_watts", "nv_gpu_power_limit", "gauge", "Power limit, in watts"),
    ("energy_joules", "nv_energy_consumption", "counter", "Energy in joules since the first reading"),
)


def triton_text(
    counted: Sequence[ModelCounts], gpus: Sequence[GpuStatistics], *, openmetrics: bool = False
) -> str:
    """Return the metrics of these models and GPUs in Prometheus' text format or OpenMetrics."""
    lines: list[str] = []
    for name, type, help, values in [*_of_models(counted), *_of_gpus(gpus)]:
        written_type = "unknown" if openmetrics and type == "counter" else type
        lines += [f"# HELP {name} {help}\n", f"# TYPE {name} {written_type}\n"]
        for labels, value in values:
            # Names of models contain no characters that need escaping.
            pairs = ",".join([f'{label}="{text}"' for label, text in sorted(labels.items())])
            lines.append(f"{name}{{{pairs}}} {value}\n")
    return "".join(lines)


def _of_models(counted: Sequence[ModelCounts]) -> Iterator[_Metric]:
    models = [({"model": one.model.name, "version": one.model.version}, one) for one in counted]
    for name, type, help, value_of in _MODEL_METRICS:
        yield name, type, help, [(labels, value_of(one.counts)) for labels, one in models]
    for name, what, attribute in _TIME_METRICS:
        help = f"Microseconds {what}, summed over the answered requests"
        times = [(labels, getattr(one.counts.answer_times, attribute)) for labels, one in models]
        yield name, "counter", help, [(labels, _us(seconds)) for labels, seconds in times]
    failures = [
        ({**labels, "reason": reason}, count)
        for labels, one in models
        for reason, count in failures_by_reason(one.counts).items()
    ]
    yield "nv_inference_request_failure", "counter", "Requests without an answer, by reason", failures
    caches = [(labels, one.model.cache.statistics()) for labels, one in models if one.model.cache is not None]
    for name, help, value in _CACHE_METRICS if caches else ():
        yield name, "counter", help, [(labels, value(found)) for labels, found in caches]


def _of_gpus(gpus: Sequence[GpuStatistics]) -> Iterator[_Metric]:
    """Yield the metrics of GPUs, without those that no GPU supports."""
    for attribute, name, type, help in _GPU_METRICS:
        readings = [({"gpu_uuid": gpu.uuid}, getattr(gpu, attribute)) for gpu in gpus]
        if values := [(labels, value) for labels, value in readings if value is not None]:
            yield name, type, help, values


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
