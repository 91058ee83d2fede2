"""Panels of the dashboard, and their queries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SERVER = 'job=~"$job",instance=~"$instance"'
MODEL = f'{SERVER},model=~"$model"'


@dataclass(frozen=True, slots=True)
class Query:
    """A Prometheus query, and the legend of its curves."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel: `kind` is Grafana's type, `width` of 24 columns, `stack` for values that add up."""

    title: str
    meaning: str
    unit: str
    queries: Sequence[Query]
    kind: str = "timeseries"
    width: int = 8
    stack: bool = False
    most: float | None = None
    exemplars: bool = False
    thresholds: Sequence[tuple[float | None, str]] = ()

    @property
    def height(self) -> int:
        """Height in Grafana's units."""
        return 4 if self.kind == "stat" else 8


def rate(name: str, *matchers: str, by: str = "", scope: str = MODEL) -> str:
    """Sum, by these labels, of a counter's growth per second."""
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({name}{{{','.join((scope, *matchers))}}}[$__rate_interval]))"


def total(name: str, by: str = "model", scope: str = MODEL) -> str:
    """Sum, by these labels, of a gauge."""
    return f"sum by ({by}) ({name}{{{scope}}})"


def largest(expr: str) -> str:
    """Largest value among the processes of a server, which all report it."""
    return f"max without (process) ({expr})"


def quantiles(name: str) -> Sequence[Query]:
    """Percentiles of a histogram of times, by model."""
    buckets = rate(f"{name}_bucket", by="model, le")
    return [
        Query(f"histogram_quantile({share}, {buckets})", f"{{{{model}}}} {label}")
        for share, label in ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"))
    ]


def share(part: str, whole: str) -> str:
    """Ratio of two sums."""
    return f"{part} / {whole}"


ANSWERED = rate("tensorferry_requests_total", 'outcome="answered"')
ENDED = rate("tensorferry_requests_total")
REFUSED = rate("tensorferry_requests_refused_total")
LATENCIES = rate("tensorferry_latency_seconds_bucket", by="le")
_GOOD_FIRST = ((None, "green"), (0.01, "yellow"), (0.05, "red"))

ROWS: Mapping[str, Sequence[Panel]] = {
    "Now": [
        Panel("Answered", "Requests per second", "reqps", [Query(ANSWERED)], "stat", 4),
        Panel(
            "Not answered",
            "Share of requests that failed, were cancelled, expired, were shed or refused",
            "percentunit",
            [Query(f"1 - {ANSWERED} / ({ENDED} + {REFUSED})")],
            "stat",
            4,
            thresholds=_GOOD_FIRST,
        ),
        Panel(
            "Latency, p99",
            "Time from arrival to answer",
            "s",
            [Query(f"histogram_quantile(0.99, {LATENCIES})")],
            "stat",
            4,
        ),
        Panel(
            "Queued",
            "Requests in the queues",
            "short",
            [Query(f"sum (tensorferry_queued_requests{{{MODEL}}})")],
            "stat",
            4,
        ),
        Panel(
            "Models that are not ready",
            "Model versions that take no requests",
            "short",
            [Query(f"sum (1 - min without (process) (tensorferry_model_ready{{{MODEL}}}))")],
            "stat",
            4,
            thresholds=((None, "green"), (1, "red")),
        ),
        Panel(
            "Instances down",
            "Instances whose device has failed or hangs",
            "short",
            [Query(f"sum (tensorferry_instances_out{{{MODEL}}})")],
            "stat",
            4,
            thresholds=((None, "green"), (1, "red")),
        ),
    ],
    "Requests": [
        Panel(
            "Requests by outcome",
            "Accepted requests that ended; cancelled: by the client; expired: the deadline passed; shed: overload",
            "reqps",
            [Query(rate("tensorferry_requests_total", by="outcome"), "{{outcome}}")],
            stack=True,
        ),
        Panel(
            "Refused at the queue",
            "Requests that were not accepted, by reason",
            "reqps",
            [Query(rate("tensorferry_requests_refused_total", by="model, reason"), "{{model}} {{reason}}")],
            stack=True,
        ),
        Panel(
            "Refused before the queue",
            "Malformed requests, unknown models, and models that are not ready, by gRPC code",
            "reqps",
            [Query(rate("tensorferry_calls_refused_total", by="code", scope=SERVER), "{{code}}")],
            stack=True,
        ),
        Panel(
            "Answered by model",
            "Requests per second",
            "reqps",
            [Query(rate("tensorferry_requests_total", 'outcome="answered"', by="model"), "{{model}}")],
        ),
        Panel(
            "Rows per second",
            "Rows of the batches that ran",
            "short",
            [Query(rate("tensorferry_batch_rows_sum", by="model"), "{{model}}")],
        ),
        Panel(
            "In flight",
            "Queued and running requests, open streams, and threads for calls",
            "short",
            [
                Query(f"sum (tensorferry_queued_requests{{{MODEL}}})", "queued"),
                Query(f"sum (tensorferry_running_requests{{{MODEL}}})", "running"),
                Query(f"sum (tensorferry_open_streams{{{SERVER}}})", "open streams"),
                Query(f"sum (tensorferry_call_threads{{{SERVER}}})", "threads for calls"),
                Query(f"sum (tensorferry_http_connections{{{SERVER}}})", "HTTP connections"),
            ],
        ),
    ],
    "Latency of answered requests": [
        Panel(
            "Latency",
            "Time from arrival to answer; points are traced requests",
            "s",
            quantiles("tensorferry_latency_seconds"),
            exemplars=True,
        ),
        Panel(
            "Queue delay",
            "Part of the latency in the queue",
            "s",
            quantiles("tensorferry_queue_delay_seconds"),
        ),
        Panel(
            "Compute time",
            "Part of the latency in which the model ran",
            "s",
            quantiles("tensorferry_compute_time_seconds"),
        ),
        Panel(
            "Time by stage",
            "Mean time of a request in each stage",
            "s",
            [
                Query(
                    f"{rate('tensorferry_request_seconds_total', by='stage')} / scalar({ANSWERED})",
                    "{{stage}}",
                )
            ],
            width=12,
            stack=True,
        ),
        Panel(
            "Distribution of latency",
            "Number of requests by latency",
            "s",
            [Query(LATENCIES, "{{le}}")],
            "heatmap",
            12,
        ),
    ],
    "Batches": [
        Panel(
            "Batch sizes",
            "Number of batches by rows",
            "short",
            [Query(rate("tensorferry_batch_rows_bucket", by="le"), "{{le}}")],
            "heatmap",
        ),
        Panel(
            "Mean batch size",
            "Rows",
            "short",
            [
                Query(
                    share(
                        rate("tensorferry_batch_rows_sum", by="model"),
                        rate("tensorferry_batch_rows_count", by="model"),
                    ),
                    "{{model}}",
                )
            ],
        ),
        Panel(
            "Batches by close reason",
            "full; preferred size; end of the window; idle: the device was free; drain",
            "ops",
            [Query(rate("tensorferry_batches_left_total", by="reason"), "{{reason}}")],
            stack=True,
        ),
        Panel(
            "Failed batches and retried requests",
            "Batches for which the model raised an exception; requests queued again because their device failed",
            "ops",
            [
                Query(rate("tensorferry_batches_failed_total", by="model"), "{{model}} failed"),
                Query(rate("tensorferry_requests_retried_total", by="model"), "{{model}} retried"),
            ],
        ),
        Panel(
            "Padding",
            "Share of padding among the positions along the padded axis",
            "percentunit",
            [
                Query(
                    share(
                        rate("tensorferry_padded_positions_total", 'kind="padding"', by="model"),
                        rate("tensorferry_padded_positions_total", by="model"),
                    ),
                    "{{model}}",
                )
            ],
            most=1,
        ),
        Panel(
            "Rows without an answer",
            "By outcome",
            "short",
            [Query(rate("tensorferry_rows_unanswered_total", by="outcome"), "{{outcome}}")],
            stack=True,
        ),
    ],
    "Steps and stages of pipelines": [
        Panel(
            "Time of a request by stage",
            "Mean time of a request in each stage of its pipeline: in the queue, and in a batch",
            "s",
            [
                Query(
                    share(
                        rate("tensorferry_stage_request_seconds_total", by="model, stage"),
                        rate("tensorferry_stage_requests_total", 'outcome="answered"', by="model, stage"),
                    ),
                    "{{model}} {{stage}}",
                )
            ],
            stack=True,
        ),
        Panel(
            "Time of a step",
            "Mean time of a batch in each step",
            "s",
            [
                Query(
                    share(
                        rate("tensorferry_step_seconds_total", by="model, step"),
                        rate("tensorferry_step_batches_total", by="model, step"),
                    ),
                    "{{model}} {{step}}",
                )
            ],
        ),
        Panel(
            "Busy by step",
            "Time in which each step ran, as a share of one device or thread",
            "percentunit",
            [Query(rate("tensorferry_step_seconds_total", by="model, step"), "{{model}} {{step}}")],
        ),
        Panel(
            "Queue delay by stage, p99",
            "Time in the queue of each stage",
            "s",
            [
                Query(
                    f"histogram_quantile(0.99, {rate('tensorferry_stage_queue_delay_seconds_bucket', by='model, stage, le')})",
                    "{{model}} {{stage}}",
                )
            ],
            width=6,
        ),
        Panel(
            "Queued rows by stage",
            "Rows that wait for each stage",
            "short",
            [Query(total("tensorferry_stage_queued_rows", by="model, stage"), "{{model}} {{stage}}")],
            width=6,
        ),
        Panel(
            "Mean batch size by stage",
            "Rows",
            "short",
            [
                Query(
                    share(
                        rate("tensorferry_stage_batch_rows_sum", by="model, stage"),
                        rate("tensorferry_stage_batch_rows_count", by="model, stage"),
                    ),
                    "{{model}} {{stage}}",
                )
            ],
            width=6,
        ),
        Panel(
            "Dropped by stage",
            "Requests that ended without the outputs of the stage, by outcome",
            "reqps",
            [
                Query(
                    rate(
                        "tensorferry_stage_requests_total",
                        'outcome!="answered"',
                        by="model, stage, outcome",
                    ),
                    "{{model}} {{stage}} {{outcome}}",
                )
            ],
            width=6,
            stack=True,
        ),
        Panel(
            "Memory of functions in processes",
            "Resident memory of the processes that run a Python function",
            "bytes",
            [
                Query(
                    total("tensorferry_step_processes_resident_bytes", by="model, step"), "{{model}} {{step}}"
                )
            ],
            width=12,
        ),
        Panel(
            "Restarts of functions in processes",
            "Processes of Python functions that ended and were started again",
            "short",
            [
                Query(
                    f"sum by (model, step) (increase(tensorferry_step_process_restarts_total{{{MODEL}}}[$__rate_interval]))",
                    "{{model}} {{step}}",
                )
            ],
            width=12,
            stack=True,
        ),
    ],
    "Queue": [
        Panel(
            "Queued rows",
            "By priority class, 1 is the highest",
            "short",
            [Query(total("tensorferry_queued_rows", by="model, priority"), "{{model}} {{priority}}")],
        ),
        Panel(
            "Bytes of requests",
            "Queued and running requests",
            "bytes",
            [Query(total("tensorferry_held_bytes"), "{{model}}")],
        ),
        Panel(
            "Kinds of queued requests",
            "Requests of different kinds cannot share a batch, so many kinds cause small batches",
            "short",
            [Query(total("tensorferry_queued_buckets"), "{{model}}")],
        ),
    ],
    "Predictions": [
        Panel(
            "Batch time",
            "Mean predicted and actual time of a batch",
            "s",
            [
                Query(
                    share(rate(f"tensorferry_batch_{what}_seconds_total", by="model"), per),
                    f"{{{{model}}}} {what}",
                )
                for per in [rate("tensorferry_batches_predicted_total", by="model")]
                for what in ("predicted", "actual")
            ],
            width=12,
        ),
        Panel(
            "Prediction error",
            "Mean absolute error as a share of the time",
            "percentunit",
            [
                Query(
                    share(
                        rate("tensorferry_batch_prediction_error_seconds_total", by="model"),
                        rate("tensorferry_batch_actual_seconds_total", by="model"),
                    ),
                    "{{model}}",
                )
            ],
            width=12,
        ),
    ],
    "Devices": [
        Panel(
            "Events of instances",
            "Crashed workers, failed devices, runs that were ended or abandoned, rebuilt sessions",
            "short",
            [
                Query(
                    f"sum by (model, event) (increase(tensorferry_instance_events_total{{{MODEL}}}[$__rate_interval]))",
                    "{{model}} {{event}}",
                )
            ],
            width=24,
            stack=True,
        ),
        Panel(
            "Busy",
            "Share of the time in which the model ran, averaged over its instances",
            "percentunit",
            [
                Query(
                    share(
                        rate("tensorferry_batch_seconds_total", 'stage="compute"', by="model"),
                        total("tensorferry_instances"),
                    ),
                    "{{model}}",
                )
            ],
            width=6,
        ),
        Panel(
            "GPU: utilization",
            "Share of the time in which a kernel ran",
            "percentunit",
            [Query(largest(f"tensorferry_gpu_utilization_ratio{{{SERVER}}}"), "{{instance}} {{gpu_uuid}}")],
            width=6,
            most=1,
        ),
        Panel(
            "GPU: memory",
            "Used and total memory",
            "percentunit",
            [
                Query(
                    largest(
                        f"tensorferry_gpu_memory_used_bytes{{{SERVER}}} / tensorferry_gpu_memory_total_bytes{{{SERVER}}}"
                    ),
                    "{{instance}} {{gpu_uuid}}",
                )
            ],
            width=6,
            most=1,
        ),
        Panel(
            "GPU: power",
            "Power draw and limit",
            "watt",
            [
                Query(largest(f"tensorferry_gpu_power_watts{{{SERVER}}}"), "{{instance}} {{gpu_uuid}}"),
                Query(
                    largest(f"tensorferry_gpu_power_limit_watts{{{SERVER}}}"),
                    "{{instance}} {{gpu_uuid}} limit",
                ),
            ],
            width=6,
        ),
    ],
    "Sequences and cache": [
        Panel(
            "Living sequences",
            "Of models with states",
            "short",
            [Query(total("tensorferry_sequences"), "{{model}}")],
            width=6,
            stack=True,
        ),
        Panel(
            "Ends of sequences",
            "ended: by the client. idle, stream, cancelled, failed and restarted: their states are lost",
            "cps",
            [Query(rate("tensorferry_sequences_ended_total", by="model, reason"), "{{model}} {{reason}}")],
            width=6,
        ),
        Panel(
            "Memory of states and cache",
            "States of living sequences, and answers in the cache",
            "bytes",
            [
                Query(total("tensorferry_state_bytes"), "{{model}} states"),
                Query(total("tensorferry_cache_bytes"), "{{model}} cache"),
            ],
            width=6,
        ),
        Panel(
            "Answers from the cache",
            "As a share of the requests to models with a cache",
            "percentunit",
            [
                Query(
                    f"{rate('tensorferry_cache_hits_total', by='model')} / ({rate('tensorferry_cache_hits_total', by='model')}"
                    f" + {rate('tensorferry_cache_misses_total', by='model')})",
                    "{{model}}",
                )
            ],
            width=6,
            most=1,
        ),
    ],
    "Process": [
        Panel(
            "Processor",
            "Cores",
            "short",
            [Query(rate("process_cpu_seconds_total", by="instance", scope=SERVER), "{{instance}}")],
        ),
        Panel(
            "Memory",
            "Resident; what processes share is counted for each",
            "bytes",
            [Query(total("process_resident_memory_bytes", by="instance", scope=SERVER), "{{instance}}")],
        ),
        Panel(
            "File descriptors",
            "Open descriptors as a share of their limit, of the process that has most",
            "percentunit",
            [
                Query(
                    largest(f"process_open_fds{{{SERVER}}} / process_max_fds{{{SERVER}}}"),
                    "{{instance}}",
                )
            ],
            most=1,
        ),
    ],
    "Servers of several processes": [
        Panel(
            "Processes by state",
            "waiting: for the next start",
            "short",
            [
                Query(
                    f"{total('tensorferry_processes', by='instance, state', scope=SERVER)} > 0",
                    "{{instance}} {{state}}",
                )
            ],
            stack=True,
        ),
        Panel(
            "Restarts",
            "Processes that ended and were started again",
            "short",
            [
                Query(
                    f"sum by (instance) (increase(tensorferry_process_restarts_total{{{SERVER}}}[$__rate_interval]))",
                    "{{instance}}",
                )
            ],
            stack=True,
        ),
        Panel(
            "Memory of all processes",
            "Resident, also of those that load models; what processes share is counted for each",
            "bytes",
            [
                Query(
                    total("tensorferry_processes_resident_bytes", by="instance", scope=SERVER),
                    "{{instance}}",
                )
            ],
        ),
    ],
}
