"""Names, types, help texts and labels of all metrics of tensorferry.

The metrics page is generated from this module. Dashboard, alerts and docs/reference/metrics.md are tested against it.
Triton's metrics are in `triton_metrics.py`.
"""

from __future__ import annotations

import enum

# Labels of every metric of a model.
MODEL_LABELS = ("model", "version")
GPU_LABELS = ("device", "gpu_uuid")


# Values of the label `outcome`, and attributes of `BatcherStatistics`, for requests that were accepted.
UNANSWERED = ("failed", "cancelled", "expired", "shed", "abandoned")
OUTCOMES = ("answered", *UNANSWERED)


class MetricName(enum.Enum):
    """Metric with its name on the page, `on_page`. `labels` excludes the labels of its whole group."""

    def __init__(self, name: str, type: str, meaning: str, *labels: str) -> None:
        self.type = type
        self.meaning = meaning
        self.labels = labels
        # The name without the suffix of its type.
        self.family = f"tensorferry_{name}"
        self.on_page = f"{self.family}_total" if type == "counter" else self.family


class ModelMetric(MetricName):
    """Metric of each version of a model."""

    READY = ("model_ready", "gauge", "1 if the version takes requests, else 0")
    INSTANCES = ("instances", "gauge", "Instances of the loaded version, including those that are down")
    INSTANCES_OUT = ("instances_out", "gauge", "Instances whose device has failed or hangs")

    INSTANCE_EVENTS = (
        "instance_events",
        "counter",
        "Events of instances: crashed workers, failed devices, runs that were ended or abandoned, rebuilt sessions",
        "event",
    )

    ACCEPTED = ("requests_accepted", "counter", "Requests accepted into the queue")
    REQUESTS = ("requests", "counter", "Accepted requests that have ended, by outcome", "outcome")
    RETRIED = (
        "requests_retried",
        "counter",
        "Accepted requests that were queued again because their device failed",
    )
    REFUSED = ("requests_refused", "counter", "Requests that were not accepted, by reason", "reason")
    ROWS_UNANSWERED = (
        "rows_unanswered",
        "counter",
        "Rows of requests without an answer, by outcome",
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
    QUEUE_DELAY = ("queue_delay_seconds", "histogram", "Part of the latency: time in the queue")
    COMPUTE_TIME = ("compute_time_seconds", "histogram", "Part of the latency: time in which the model ran")

    BATCH_ROWS = ("batch_rows", "histogram", "Rows of the batches that ran, without padding")
    BATCH_SECONDS = (
        "batch_seconds",
        "counter",
        "Time of the batches that ran, by stage",
        "stage",
    )
    BATCHES_LEFT = ("batches_left", "counter", "Closed batches, by the reason for closing", "reason")
    BATCHES_FAILED = (
        "batches_failed",
        "counter",
        "Batches, or halves of batches, for which the model raised an exception",
    )
    BATCHES_PREDICTED = ("batches_predicted", "counter", "Answered batches with a predicted time")
    PREDICTED_SECONDS = (
        "batch_predicted_seconds",
        "counter",
        "Predicted time of these batches until they were answered",
    )
    ACTUAL_SECONDS = (
        "batch_actual_seconds",
        "counter",
        "Actual time of these batches until they were answered",
    )
    PREDICTION_ERROR = (
        "batch_prediction_error_seconds",
        "counter",
        "Sum of the absolute differences between both",
    )
    PADDED_POSITIONS = (
        "padded_positions",
        "counter",
        "Positions along the padded axis in rows that ran in padded batches",
        "kind",
    )

    QUEUED = ("queued_requests", "gauge", "Queued requests; each part of a split request counts")
    QUEUED_ROWS = ("queued_rows", "gauge", "Queued rows by priority class, 1 is the highest", "priority")
    QUEUED_BUCKETS = (
        "queued_buckets",
        "gauge",
        "Kinds of queued requests by shape and datatype, which cannot share a batch",
    )
    FULL_BATCH_ROWS = (
        "full_batch_rows",
        "gauge",
        "Rows of a full batch of the last requests' shape: those that pay, at most the model's max_batch_size",
    )
    RUNNING = ("running_requests", "gauge", "Requests whose batch has closed and that are not answered yet")
    HELD_BYTES = ("held_bytes", "gauge", "Bytes of the queued and running requests")

    SEQUENCES = ("sequences", "gauge", "Living sequences of a model with states")
    SEQUENCES_STARTED = ("sequences_started", "counter", "Sequences that were started")
    SEQUENCES_ENDED = ("sequences_ended", "counter", "Sequences that have ended, by reason", "reason")
    STATE_BYTES = ("state_bytes", "gauge", "Bytes of the states of living sequences")

    CACHE_HITS = ("cache_hits", "counter", "Requests that were answered by the cache")
    CACHE_MISSES = ("cache_misses", "counter", "Requests to a model with a cache that were run")
    CACHE_BYTES = ("cache_bytes", "gauge", "Bytes of the answers in the cache")


class StepMetric(MetricName):
    """Metric of each step of a model, and of each stage of a pipeline of several."""

    STEP_BATCHES = ("step_batches", "counter", "Batches that a step of a model has run", "step")
    STEP_SECONDS = ("step_seconds", "counter", "Time of these runs", "step")
    STEP_PROCESSES = ("step_processes", "gauge", "Processes that run a function now", "step")
    STEP_RESTARTS = ("step_process_restarts", "counter", "Starts of these after the first of each", "step")
    STEP_MEMORY = (
        "step_processes_resident_bytes",
        "gauge",
        "Resident memory of these; what processes share is counted for each",
        "step",
    )
    STAGE_REQUESTS = (
        "stage_requests",
        "counter",
        "Requests that have ended in a stage of a pipeline, by outcome",
        "outcome",
        "stage",
    )
    STAGE_REQUEST_SECONDS = (
        "stage_request_seconds",
        "counter",
        "Time from arrival in a stage to its outputs, summed over the requests that it answered",
        "stage",
    )
    STAGE_QUEUE_DELAY = (
        "stage_queue_delay_seconds",
        "histogram",
        "Part of this time: in the queue of the stage",
        "stage",
    )
    STAGE_BATCH_ROWS = ("stage_batch_rows", "histogram", "Rows of the batches of a stage", "stage")
    STAGE_QUEUED_ROWS = ("stage_queued_rows", "gauge", "Rows in the queue of a stage", "stage")


class ServerMetric(MetricName):
    """Metric of the server as a whole."""

    INFO = ("server_info", "gauge", "1, with release and transport as labels", "release", "transport")
    READY = ("server_ready", "gauge", "1 after everything is loaded until the server drains, else 0")
    CALLS_REFUSED = (
        "calls_refused",
        "counter",
        "Requests that never reached a model's queue, by gRPC code",
        "code",
    )
    OPEN_STREAMS = ("open_streams", "gauge", "Open calls of ModelStreamInfer")
    UNSENT_BYTES = ("unsent_answer_bytes", "gauge", "Bytes of answers that clients have not read yet")
    CALL_THREADS = (
        "call_threads",
        "gauge",
        "Threads in the pools for calls, started on demand; idle threads end after 10 seconds",
    )
    HTTP_CONNECTIONS = ("http_connections", "gauge", "Open connections of --http-port")


class ProcessMetric(MetricName):
    """Metric of the processes of a server of several."""

    PROCESSES = (
        "processes",
        "gauge",
        "Processes that the supervisor keeps running, by state",
        "state",
    )
    RESTARTS = ("process_restarts", "counter", "Starts of processes after the first of each")
    MEMORY = (
        "processes_resident_bytes",
        "gauge",
        "Resident memory; what processes share is counted for each",
    )


class GpuMetric(MetricName):
    """Metric of each GPU in use. The members have the names of attributes of `GpuStatistics`."""

    UTILIZATION = ("gpu_utilization_ratio", "gauge", "Share of the time in which a kernel ran, 0 to 1")
    MEMORY_USED_BYTES = ("gpu_memory_used_bytes", "gauge", "Memory in use by all processes")
    MEMORY_TOTAL_BYTES = ("gpu_memory_total_bytes", "gauge", "Total memory")
    TEMPERATURE_CELSIUS = ("gpu_temperature_celsius", "gauge", "Temperature")
    POWER_WATTS = ("gpu_power_watts", "gauge", "Power draw")
    POWER_LIMIT_WATTS = ("gpu_power_limit_watts", "gauge", "Power limit")
    ENERGY_JOULES = ("gpu_energy_joules", "counter", "Energy since the first reading")
