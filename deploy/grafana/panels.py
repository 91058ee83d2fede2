"""Panels of the dashboard. Their queries are made by `queries.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from queries import MODEL, SERVER, Query, curves, increases, largest, means, quantiles, rate, rates, totals


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


def stat(
    title: str, meaning: str, unit: str, expr: str, thresholds: Sequence[tuple[float | None, str]] = ()
) -> Panel:
    """A panel with one number."""
    return Panel(title, meaning, unit, [Query(expr)], "stat", 4, thresholds=thresholds)


ANSWERED = rate("tensorferry_requests_total", 'outcome="answered"')
ENDED = rate("tensorferry_requests_total")
REFUSED = rate("tensorferry_requests_refused_total")
LATENCIES = rate("tensorferry_latency_seconds_bucket", by="le")
STAGE_SECONDS = rate("tensorferry_request_seconds_total", by="stage")
HITS = rate("tensorferry_cache_hits_total", by="model")
MISSES = rate("tensorferry_cache_misses_total", by="model")
PADDED = rate("tensorferry_padded_positions_total", 'kind="padding"', by="model")
COMPUTED = rate("tensorferry_batch_seconds_total", 'stage="compute"', by="model")
STAGE_DELAYS = rate("tensorferry_stage_queue_delay_seconds_bucket", by="model, stage, le")
GPU_MEMORY = f"tensorferry_gpu_memory_used_bytes{{{SERVER}}} / tensorferry_gpu_memory_total_bytes{{{SERVER}}}"
_GOOD_FIRST = ((None, "green"), (0.01, "yellow"), (0.05, "red"))
_NONE_IS_GOOD = ((None, "green"), (1, "red"))
_GPU = "instance, gpu_uuid"

ROWS: Mapping[str, Sequence[Panel]] = {
    "Now": [
        stat("Answered", "Requests per second", "reqps", ANSWERED),
        stat(
            "Not answered",
            "Share of requests that failed, were cancelled, expired, were shed or refused",
            "percentunit",
            f"1 - {ANSWERED} / ({ENDED} + {REFUSED})",
            _GOOD_FIRST,
        ),
        stat("Latency, p99", "Time from arrival to answer", "s", f"histogram_quantile(0.99, {LATENCIES})"),
        stat("Queued", "Requests in the queues", "short", f"sum (tensorferry_queued_requests{{{MODEL}}})"),
        stat(
            "Models that are not ready",
            "Model versions that take no requests",
            "short",
            f"sum (1 - min without (process) (tensorferry_model_ready{{{MODEL}}}))",
            _NONE_IS_GOOD,
        ),
        stat(
            "Instances down",
            "Instances whose device has failed or hangs",
            "short",
            f"sum (tensorferry_instances_out{{{MODEL}}})",
            _NONE_IS_GOOD,
        ),
    ],
    "Requests": [
        Panel(
            "Requests by outcome",
            "Accepted requests that ended; cancelled: by the client; expired: the deadline passed; shed: overload",
            "reqps",
            [rates("tensorferry_requests_total", by="outcome")],
            stack=True,
        ),
        Panel(
            "Refused at the queue",
            "Requests that were not accepted, by reason",
            "reqps",
            [rates("tensorferry_requests_refused_total", by="model, reason")],
            stack=True,
        ),
        Panel(
            "Refused before the queue",
            "Malformed requests, unknown models, and models that are not ready, by gRPC code",
            "reqps",
            [rates("tensorferry_calls_refused_total", by="code", scope=SERVER)],
            stack=True,
        ),
        Panel(
            "Answered by model",
            "Requests per second",
            "reqps",
            [rates("tensorferry_requests_total", 'outcome="answered"')],
        ),
        Panel(
            "Rows per second", "Rows of the batches that ran", "short", [rates("tensorferry_batch_rows_sum")]
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
            [curves(f"{STAGE_SECONDS} / scalar({ANSWERED})", "stage")],
            width=12,
            stack=True,
        ),
        Panel(
            "Distribution of latency",
            "Number of requests by latency",
            "s",
            [curves(LATENCIES, "le")],
            "heatmap",
            12,
        ),
    ],
    "Batches": [
        Panel(
            "Batch sizes",
            "Number of batches by rows",
            "short",
            [rates("tensorferry_batch_rows_bucket", by="le")],
            "heatmap",
        ),
        Panel(
            "Mean batch size",
            "Rows",
            "short",
            [means("tensorferry_batch_rows_sum", "tensorferry_batch_rows_count")],
        ),
        Panel(
            "Batches by close reason",
            "full; preferred size; end of the window; idle: the device was free; drain",
            "ops",
            [rates("tensorferry_batches_left_total", by="reason")],
            stack=True,
        ),
        Panel(
            "Failed batches and retried requests",
            "Batches for which the model raised an exception; requests queued again because their device failed",
            "ops",
            [
                rates("tensorferry_batches_failed_total", what="failed"),
                rates("tensorferry_requests_retried_total", what="retried"),
            ],
        ),
        Panel(
            "Padding",
            "Share of padding among the positions along the padded axis",
            "percentunit",
            [curves(f"{PADDED} / {rate('tensorferry_padded_positions_total', by='model')}", "model")],
            most=1,
        ),
        Panel(
            "Rows without an answer",
            "By outcome",
            "short",
            [rates("tensorferry_rows_unanswered_total", by="outcome")],
            stack=True,
        ),
    ],
    "Steps and stages of pipelines": [
        Panel(
            "Time of a request by stage",
            "Mean time of a request in each stage of its pipeline: in the queue, and in a batch",
            "s",
            [
                means(
                    "tensorferry_stage_request_seconds_total",
                    "tensorferry_stage_requests_total",
                    'outcome="answered"',
                    by="model, stage",
                )
            ],
            stack=True,
        ),
        Panel(
            "Time of a step",
            "Mean time of a batch in each step",
            "s",
            [means("tensorferry_step_seconds_total", "tensorferry_step_batches_total", by="model, step")],
        ),
        Panel(
            "Busy by step",
            "Time in which each step ran, as a share of one device or thread",
            "percentunit",
            [rates("tensorferry_step_seconds_total", by="model, step")],
        ),
        Panel(
            "Queue delay by stage, p99",
            "Time in the queue of each stage",
            "s",
            [curves(f"histogram_quantile(0.99, {STAGE_DELAYS})", "model, stage")],
            width=6,
        ),
        Panel(
            "Queued rows by stage",
            "Rows that wait for each stage",
            "short",
            [totals("tensorferry_stage_queued_rows", "model, stage")],
            width=6,
        ),
        Panel(
            "Mean batch size by stage",
            "Rows",
            "short",
            [
                means(
                    "tensorferry_stage_batch_rows_sum",
                    "tensorferry_stage_batch_rows_count",
                    by="model, stage",
                )
            ],
            width=6,
        ),
        Panel(
            "Dropped by stage",
            "Requests that ended without the outputs of the stage, by outcome",
            "reqps",
            [rates("tensorferry_stage_requests_total", 'outcome!="answered"', by="model, stage, outcome")],
            width=6,
            stack=True,
        ),
        Panel(
            "Memory of functions in processes",
            "Resident memory of the processes that run a Python function",
            "bytes",
            [totals("tensorferry_step_processes_resident_bytes", "model, step")],
            width=12,
        ),
        Panel(
            "Restarts of functions in processes",
            "Processes of Python functions that ended and were started again",
            "short",
            [increases("tensorferry_step_process_restarts_total", "model, step")],
            width=12,
            stack=True,
        ),
    ],
    "Queue": [
        Panel(
            "Queued rows",
            "By priority class, 1 is the highest",
            "short",
            [totals("tensorferry_queued_rows", "model, priority")],
        ),
        Panel(
            "Bytes of requests", "Queued and running requests", "bytes", [totals("tensorferry_held_bytes")]
        ),
        Panel(
            "Kinds of queued requests",
            "Requests of different kinds cannot share a batch, so many kinds cause small batches",
            "short",
            [totals("tensorferry_queued_buckets")],
        ),
    ],
    "Predictions": [
        Panel(
            "Batch time",
            "Mean predicted and actual time of a batch",
            "s",
            [
                means(
                    f"tensorferry_batch_{what}_seconds_total",
                    "tensorferry_batches_predicted_total",
                    what=what,
                )
                for what in ("predicted", "actual")
            ],
            width=12,
        ),
        Panel(
            "Prediction error",
            "Mean absolute error as a share of the time",
            "percentunit",
            [
                means(
                    "tensorferry_batch_prediction_error_seconds_total",
                    "tensorferry_batch_actual_seconds_total",
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
            [increases("tensorferry_instance_events_total", "model, event")],
            width=24,
            stack=True,
        ),
        Panel(
            "Busy",
            "Share of the time in which the model ran, averaged over its instances",
            "percentunit",
            [curves(f"{COMPUTED} / {totals('tensorferry_instances').expr}", "model")],
            width=6,
        ),
        Panel(
            "GPU: utilization",
            "Share of the time in which a kernel ran",
            "percentunit",
            [curves(largest(f"tensorferry_gpu_utilization_ratio{{{SERVER}}}"), _GPU)],
            width=6,
            most=1,
        ),
        Panel(
            "GPU: memory",
            "Used and total memory",
            "percentunit",
            [curves(largest(GPU_MEMORY), _GPU)],
            width=6,
            most=1,
        ),
        Panel(
            "GPU: power",
            "Power draw and limit",
            "watt",
            [
                curves(largest(f"tensorferry_gpu_power_watts{{{SERVER}}}"), _GPU),
                curves(largest(f"tensorferry_gpu_power_limit_watts{{{SERVER}}}"), _GPU, "limit"),
            ],
            width=6,
        ),
    ],
    "Sequences and cache": [
        Panel(
            "Living sequences",
            "Of models with states",
            "short",
            [totals("tensorferry_sequences")],
            width=6,
            stack=True,
        ),
        Panel(
            "Ends of sequences",
            "ended: by the client. idle, stream, cancelled, failed and restarted: their states are lost",
            "cps",
            [rates("tensorferry_sequences_ended_total", by="model, reason")],
            width=6,
        ),
        Panel(
            "Memory of states and cache",
            "States of living sequences, and answers in the cache",
            "bytes",
            [
                totals("tensorferry_state_bytes", what="states"),
                totals("tensorferry_cache_bytes", what="cache"),
            ],
            width=6,
        ),
        Panel(
            "Answers from the cache",
            "As a share of the requests to models with a cache",
            "percentunit",
            [curves(f"{HITS} / ({HITS} + {MISSES})", "model")],
            width=6,
            most=1,
        ),
    ],
    "Process": [
        Panel(
            "Processor", "Cores", "short", [rates("process_cpu_seconds_total", by="instance", scope=SERVER)]
        ),
        Panel(
            "Memory",
            "Resident; what processes share is counted for each",
            "bytes",
            [totals("process_resident_memory_bytes", "instance", SERVER)],
        ),
        Panel(
            "File descriptors",
            "Open descriptors as a share of their limit, of the process that has most",
            "percentunit",
            [curves(largest(f"process_open_fds{{{SERVER}}} / process_max_fds{{{SERVER}}}"), "instance")],
            most=1,
        ),
    ],
    "Servers of several processes": [
        Panel(
            "Processes by state",
            "waiting: for the next start",
            "short",
            [curves(f"sum by (instance, state) (tensorferry_processes{{{SERVER}}}) > 0", "instance, state")],
            stack=True,
        ),
        Panel(
            "Restarts",
            "Processes that ended and were started again",
            "short",
            [increases("tensorferry_process_restarts_total", "instance", SERVER)],
            stack=True,
        ),
        Panel(
            "Memory of all processes",
            "Resident, also of those that load models; what processes share is counted for each",
            "bytes",
            [totals("tensorferry_processes_resident_bytes", "instance", SERVER)],
        ),
    ],
}
