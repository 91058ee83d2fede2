"""Status of a server as JSON: its models, their counts and their latest batches.

docs/reference/status.md has the schema.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from tensorferry.batcher import (
    BOUNDS,
    BatcherStatistics,
    BatchMember,
    BatchRecord,
    Pipeline,
    StatefulBatcher,
)
from tensorferry.server.config.server_config import ServerConfig
from tensorferry.server.inference.service import InferenceService
from tensorferry.server.models.lifecycle.model import Model
from tensorferry.server.models.lifecycle.registry import ModelRegistry, ModelState, RegistryEntry
from tensorferry.server.observability.monitoring.metrics.metric_names import OUTCOMES
from tensorferry.server.observability.monitoring.processes import ServerStatistics, resident_bytes
from tensorferry.server.observability.monitoring.step_statistics import ModelCounts, StageCounts, counts_of
from tensorferry.server.signature import TensorSpec

# Incremented when a field changes its meaning or is removed. New fields may be added at any time.
SCHEMA = 1

# Number of batches per model and stage. With all that a batcher keeps, a report of many models would have megabytes.
MAX_BATCHES = 32


class StatusReport:
    """Reporter of a server's status. Thread-safe."""

    def __init__(
        self,
        registry: ModelRegistry,
        service: InferenceService,
        config: ServerConfig,
        address: Callable[[], str],
        statistics: Callable[[], ServerStatistics],
    ) -> None:
        self._registry = registry
        self._service = service
        self._config = config
        self._address = address
        self._statistics = statistics
        self._started_at = time.monotonic()

    def ready(self) -> bool:
        """Return the value of ServerReady and of the gRPC health service."""
        return self._service.ready

    def problems(self) -> Sequence[str]:
        """Return a line for each reason why the server, or a model, takes no requests."""
        lines = []
        if self._service.draining:
            lines.append("the server is draining")
        elif self._service.lame_duck:
            lines.append("the server is about to drain")
        if not self._registry.complete:
            lines.append("models are still being loaded")
        for entry in self._registry.entries():
            if entry.state is not ModelState.READY:
                why = f": {entry.reason}" if entry.reason else ""
                lines.append(f"model {entry.name} version {entry.version} is {entry.state.value}{why}")
        return lines

    def report(self) -> dict[str, Any]:
        """Return the current status."""
        now, server = time.monotonic(), self._statistics()
        return {
            "schema": SCHEMA,
            "server": {
                "version": server.release,
                "address": self._address(),
                "transport": server.transport,
                "uptime_seconds": now - self._started_at,
            },
            "processes": [asdict(process) for process in server.processes],
            "ready": self.ready(),
            "draining": self._service.draining,
            "problems": self.problems(),
            "now_seconds": now,
            "bounds_seconds": list(BOUNDS),
            "models": [self._model(entry) for entry in self._registry.entries()],
        }

    def _model(self, entry: RegistryEntry) -> dict[str, Any]:
        status: dict[str, Any] = {
            "name": entry.name,
            "version": entry.version,
            "state": entry.state.value,
            "reason": entry.reason,
        }
        model = entry.model
        if model is not None:
            counted = counts_of(model)
            status |= {
                "inputs": [_tensor(spec) for spec in model.signature.inputs],
                "outputs": [_tensor(spec) for spec in model.signature.outputs],
                "batching": model.batching,
                "batching_verdict": model.batching_verdict,
                "settings": self._settings(model),
                **_counts(counted.counts, counted.of_batchers),
                "sequences": _sequences(model),
                "cache": {} if model.cache is None else asdict(model.cache.statistics()),
                "last_batches": _batches(model.batcher.last_batches()),
                "steps": _steps(counted),
                "stages": _stages(counted),
            }
        return status

    def _settings(self, model: Model) -> dict[str, Any]:
        settings, padding = model.batcher.settings, model.padding
        return {
            "max_batch_size": settings.max_batch_size,
            "max_queue_delay_seconds": settings.max_queue_delay,
            "preferred_batch_sizes": settings.preferred_batch_sizes,
            "requests_share_batches": settings.merge and settings.max_batch_size > 0,
            "priority_weights": settings.priority_weights,
            "strict_priorities": settings.strict_priorities,
            "default_priority": settings.default_priority,
            "queue_policies": [
                {
                    "timeout_seconds": _finite(policy.timeout),
                    "overridable": policy.overridable,
                    "action": "delay" if policy.delays else "reject",
                    "max_requests": policy.max_requests,
                }
                for policy in settings.policies
            ],
            "devices": model.devices,
            "batches_in_flight_per_device": 2 if settings.pipelined else 1,
            "padded_lengths": padding.lengths if padding is not None else (),
            "states": model.batcher.states if isinstance(model.batcher, StatefulBatcher) else {},
            "slo_seconds": _finite(model.slo),
            "max_queue_rows": settings.max_queue_size,
            "max_queue_bytes": settings.max_queue_bytes,
            "max_message_bytes": self._config.max_message_bytes,
            "run_timeout_seconds": self._config.for_model(model.name).run_timeout,
        }


def _sequences(model: Model) -> dict[str, Any]:
    """Return counts of the sequences of a model with states; none for any other."""
    if not isinstance(model.batcher, StatefulBatcher):
        return {}
    found = model.batcher.sequence_statistics()
    return {
        "living": found.living,
        "waiting_requests": found.waiting,
        "state_bytes": found.state_bytes,
        "started": found.started,
        "ended": {reason.value: count for reason, count in found.ended.items()},
    }


def _finite(seconds: float) -> float | None:
    """Return None, which means no limit, for infinity, because JSON has no infinity."""
    return seconds if math.isfinite(seconds) else None


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "datatype": spec.datatype.name,
        "shape": spec.shape,
        "axes": spec.rows_placed(spec.dims),
    }


def _steps(counted: ModelCounts) -> Sequence[dict[str, Any]]:
    by_step = {id(counts.step): counts for counts in counted.steps()}
    return [
        {
            "name": step.name,
            "kind": step.kind,
            "stage": step.stage,
            "reads": [{"name": name, "tensor": tensor} for name, tensor in step.inputs.items()],
            "gives": [{"name": name, "tensor": tensor} for name, tensor in step.outputs.items()],
            "processes": [
                {
                    "pid": process.pid,
                    "restarts": process.restarts,
                    "resident_bytes": resident_bytes(process.pid),
                }
                for process in step.processes
            ],
            # None if another model runs it.
            "ran": None if counts is None else counts.batches,
            "compute_seconds": None if counts is None else counts.seconds,
        }
        for step in counted.model.steps
        for counts in [by_step.get(id(step))]
    ]


def _stages(counted: ModelCounts) -> Sequence[dict[str, Any]]:
    """Return the stages of a pipeline of several."""
    pipeline = counted.model.batcher
    if not isinstance(pipeline, Pipeline):
        return ()
    own = {stage.name: stage for stage in counted.stages}
    named = {step.stage: step.name for step in counted.model.steps}
    batches = pipeline.stage_batches()
    return [
        _stage(own[stage.name], batches[stage.name])
        if stage.name in own
        else {"name": stage.name, "model": named[stage.name]}
        for stage in pipeline.stages
    ]


def _stage(stage: StageCounts, batches: Sequence[BatchRecord]) -> dict[str, Any]:
    return {
        "name": stage.name,
        "model": None,
        "max_batch_size": stage.settings.max_batch_size,
        "devices": stage.devices,
        **_counts(stage.counts, [stage.counts]),
        "sequences": {},
        "last_batches": _batches(batches),
    }


def _counts(counts: BatcherStatistics, of_batchers: Sequence[BatcherStatistics]) -> dict[str, Any]:
    sizes, times = counts.sizes, counts.answer_times
    return {
        "requests": {name: getattr(counts, name) for name in ("accepted", *OUTCOMES, "refused", "retried")},
        "refusals": counts.refusals,
        "times": {
            "queue": counts.queue_delays.counts,
            "compute": counts.compute_times.counts,
            "total": counts.latencies.counts,
        },
        "answer_seconds": {
            "queue": times.queue_delay_sum,
            "input": times.input_time_sum,
            "compute": times.compute_time_sum,
            "output": times.output_time_sum,
        },
        "batches": {
            "ran": counts.batches,
            "failed": counts.failed_batches,
            "rows": counts.rows,
            "compute_seconds": sum(one.compute_time_sum for one in of_batchers),
            "full_rows": counts.full_batch_rows,
            "row_seconds": {str(rows): each for rows, each in counts.full_batch_row_seconds.items()},
            "by_rows": {str(rows): batches for rows, batches in sorted(counts.batch_rows.items())},
            "by_reason": {reason.value: batches for reason, batches in counts.close_reasons.items()},
        },
        "predictions": {
            "batches": counts.predictions,
            "predicted_seconds": counts.predicted_time_sum,
            "actual_seconds": counts.actual_time_sum,
            "error_seconds": counts.prediction_error_sum,
        },
        "padding": {"positions": counts.positions, "added": counts.padding_positions},
        "queue": {
            "requests": sizes.queued,
            "rows": sizes.queued_rows,
            "rows_by_priority": sizes.class_rows,
            "running": sizes.running,
            "bytes": sizes.held_bytes,
        },
        "warnings": list(counts.warnings),
    }


def _batches(records: Sequence[BatchRecord]) -> Sequence[dict[str, Any]]:
    return [_batch_status(record) for record in records[-MAX_BATCHES:]]


def _batch_status(record: BatchRecord) -> dict[str, Any]:
    return {
        "number": record.number,
        "instance": record.instance,
        "requests": record.requests,
        "rows": record.rows,
        "reason": record.reason.value if record.reason is not None else None,
        "again": record.again,
        "error": record.error,
        "predicted_seconds": record.predicted or None,
        "padded_length": record.padded_length,
        "closed": record.closed_at,
        "join_started": record.join_at,
        "ready": record.ready,
        "started": record.started,
        "ended": record.ended,
        "answered": record.answered,
        "done": record.done,
        "step_ends": [{"name": name, "ended": ended} for name, ended in record.step_ends],
        "members": None if record.members is None else [_member_status(member) for member in record.members],
    }


def _member_status(member: BatchMember) -> dict[str, Any]:
    return {
        "id": str(member.tag or ""),
        "rows": member.rows,
        "priority": member.priority,
        "waited_seconds": member.queue_delay,
        "answered": member.answered,
    }
