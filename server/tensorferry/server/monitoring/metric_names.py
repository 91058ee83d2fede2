"""Every metric of our own, in this one place: its name, its type, what it means, and its labels.

The page is made from it, and the dashboard, the alerts and docs/reference/metrics.md are tested against it. (Triton's
metrics, under Triton's names, are in `triton_metrics.py`.)
"""

from __future__ import annotations

import enum

# Of every metric of a model.
MODEL_LABELS = ("model", "version")
GPU_LABELS = ("device", "gpu_uuid")


class MetricName(enum.Enum):
    """A metric: how it stands on the page is `on_page`; `labels` are those beside what all of its group have."""

    def __init__(self, name: str, type: str, meaning: str, *labels: str) -> None:
        self.type = type
        self.meaning = meaning
        self.labels = labels
        # Without what its type puts behind it.
        self.family = f"tensorferry_{name}"
        self.on_page = f"{self.family}_total" if type == "counter" else self.family


class ModelMetric(MetricName):
    """Of each version of a model."""

    READY = ("model_ready", "gauge", "1 where the version takes requests, 0 where it does not, or not yet")
    INSTANCES = ("instances", "gauge", "Instances of the loaded version, those that are out with them")
    INSTANCES_OUT = ("instances_out", "gauge", "Instances whose device failed, or hangs")

    INSTANCE_EVENTS = (
        "instance_events",
        "counter",
        "What befell instances: workers that died, devices that failed, runs that were ended or given up, sessions built anew",
        "event",
    )

    ACCEPTED = ("requests_accepted", "counter", "Requests that the queue took in")
    REQUESTS = ("requests", "counter", "Accepted requests that have ended, by how", "outcome")
    RETRIED = (
        "requests_retried",
        "counter",
        "Accepted requests that were queued again, since their device failed",
    )
    REFUSED = ("requests_refused", "counter", "Requests that were not accepted, by reason", "reason")
    ROWS_UNANSWERED = (
        "rows_unanswered",
        "counter",
        "Rows of requests that got no answer, by what became of them",
        "outcome",
    )
    REQUEST_SECONDS = (
        "request_seconds",
        "counter",
        "Time from arrival to answer, summed over the answered requests, by stage",
        "stage",
    )
    UNANSWERED_SECONDS = (
        "unanswered_seconds",
        "counter",
        "Time from arrival to end, summed over accepted requests without an answer",
    )
    LATENCY = ("latency_seconds", "histogram", "Time from arrival to answer, of the answered requests")
    QUEUE_DELAY = ("queue_delay_seconds", "histogram", "Of it, the time that they waited")
    COMPUTE_TIME = ("compute_time_seconds", "histogram", "Of it, the time in which the model ran")

    BATCH_ROWS = ("batch_rows", "histogram", "Rows of the batches that ran, padding not counted")
    BATCH_SECONDS = (
        "batch_seconds",
        "counter",
        "Time of the batches that ran, by stage; compute: the model ran",
        "stage",
    )
    BATCHES_LEFT = ("batches_left", "counter", "Batches that left the queue, by why they did then", "reason")
    BATCHES_FAILED = (
        "batches_failed",
        "counter",
        "Batches, or halves of such, for which the model raised",
    )
    BATCHES_PREDICTED = ("batches_predicted", "counter", "Answered batches whose time had been predicted")
    PREDICTED_SECONDS = (
        "batch_predicted_seconds",
        "counter",
        "Time that these batches should have taken until answered",
    )
    ACTUAL_SECONDS = ("batch_actual_seconds", "counter", "Time that these batches took until answered")
    PREDICTION_ERROR = (
        "batch_prediction_error_seconds",
        "counter",
        "The differences between both, each counted as positive",
    )
    PADDED_POSITIONS = (
        "padded_positions",
        "counter",
        "Positions along the padded axis in rows that ran in padded batches",
        "kind",
    )

    QUEUED = ("queued_requests", "gauge", "Requests that wait; a part of one that was cut counts as one")
    QUEUED_ROWS = ("queued_rows", "gauge", "Rows that wait, by priority class, 1 the highest", "priority")
    QUEUED_BUCKETS = (
        "queued_buckets",
        "gauge",
        "Kinds of requests that wait: those of two kinds share no batch",
    )
    RUNNING = ("running_requests", "gauge", "Requests whose batch has left and that are not answered")
    HELD_BYTES = ("held_bytes", "gauge", "Bytes of the requests that wait or run")


class ServerMetric(MetricName):
    """Of the server as a whole."""

    INFO = ("server_info", "gauge", "1, with what serves in the labels", "release", "transport")
    READY = ("server_ready", "gauge", "1 from when all is loaded until the server drains, else 0")
    CALLS_REFUSED = (
        "calls_refused",
        "counter",
        "Requests that never reached a model's queue, by the gRPC code that they were answered with",
        "code",
    )
    OPEN_STREAMS = ("open_streams", "gauge", "Open calls of ModelStreamInfer")
    UNSENT_BYTES = ("unsent_answer_bytes", "gauge", "Bytes of answers that clients have yet to read")
    CALL_THREADS = (
        "call_threads",
        "gauge",
        "Threads in the pools for calls: made as calls need them, they stay",
    )


class GpuMetric(MetricName):
    """Of each GPU that serves."""

    UTILIZATION = ("gpu_utilization_ratio", "gauge", "Share of the time in which a kernel ran, 0 to 1")
    MEMORY_USED = ("gpu_memory_used_bytes", "gauge", "Memory in use, by all processes")
    MEMORY_TOTAL = ("gpu_memory_total_bytes", "gauge", "Memory that there is")
    TEMPERATURE = ("gpu_temperature_celsius", "gauge", "Temperature")
    POWER = ("gpu_power_watts", "gauge", "Power that is drawn")
    POWER_LIMIT = ("gpu_power_limit_watts", "gauge", "Power that may be drawn")
    ENERGY = ("gpu_energy_joules", "counter", "Energy drawn since the first look")


# Of prometheus-client, about the process.
PROCESS_METRICS = (
    "process_virtual_memory_bytes",
    "process_resident_memory_bytes",
    "process_start_time_seconds",
    "process_cpu_seconds_total",
    "process_open_fds",
    "process_max_fds",
)
