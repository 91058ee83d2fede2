"""Inspections as JSON. The form is documented in docs/guides/serving.md; fields are added, never changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tensorferry.server.inspection.batch_sizes import BEST_RULE, best_size, full_batch, within
from tensorferry.server.inspection.batch_times import BatchTime
from tensorferry.server.inspection.core_layouts import better_layout
from tensorferry.server.inspection.inspection import Inspection
from tensorferry.server.inspection.measuring import Measurements
from tensorferry.server.model_config.pbtxt import BatchingDecision
from tensorferry.server.signature import TensorSpec

# The version of the form.
FORM = 1


def json_of(models: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the whole output for models as `model_of` or `failure_of` returns them."""
    return {"form": FORM, "models": list(models)}


def failure_of(argument: str, error: Exception) -> dict[str, Any]:
    """Return what is said of a MODEL that cannot be loaded."""
    return {"argument": argument, "loaded": False, "error": str(error)}


def model_of(argument: str, found: Inspection, bounds: Sequence[float]) -> dict[str, Any]:
    """Return what is known of a model. `bounds` are bounds of latency in seconds."""
    batches = found.measured.batches if found.measured is not None else ()
    best = best_size(batches)
    return {
        "argument": argument,
        "loaded": True,
        "name": found.name,
        "version": found.version,
        "file": str(found.path),
        "kind": found.kind,
        "inputs": [_tensor(spec) for spec in found.signature.inputs],
        "optional_inputs": [_tensor(spec) for spec in found.signature.optional],
        "outputs": [_tensor(spec) for spec in found.signature.outputs],
        "devices": list(found.devices),
        "batching": _decision(found.decision) | {"cures": list(found.decision.cures)},
        "measured": None if found.measured is None else _measured(found.measured),
        "not_measured": found.not_measured,
        "best_batch_size": None if best is None else best.rows,
        "best_rule": BEST_RULE,
        "full_batch_rows": full_batch(batches, found.decision.max_batch_size)
        if found.decision.merges
        else None,
        "latency_bounds": [_bound(batches, seconds) for seconds in bounds if batches],
    }


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "datatype": spec.datatype.name,
        "shape": None if spec.any_rank else list(spec.shape),
        "counts_rows": spec.has_row_axis,
        "batch_axis": spec.batch_axis if spec.has_row_axis else None,
    }


def _decision(decision: BatchingDecision) -> dict[str, Any]:
    return {
        "verdict": decision.verdict,
        "description": decision.description,
        "max_batch_size": decision.max_batch_size,
        "shares_batches": decision.merges,
        "reason": decision.reason,
        "evidence": decision.evidence,
        "rewritten": decision.rewritten,
    }


def _measured(measured: Measurements) -> dict[str, Any]:
    return {
        "device": measured.devices[0] if measured.devices else "",
        "memory": measured.memory,
        "loaded_bytes": measured.loaded_bytes,
        "lengths": dict(measured.lengths),
        "padding_waste": measured.padding_waste,
        "batches": [
            {
                "rows": batch.rows,
                "ms": batch.seconds * 1e3,
                "ms_per_row": batch.seconds * 1e3 / batch.rows,
                "rows_per_second": batch.rows_per_second,
                "runs": batch.runs,
                "memory_bytes": batch.memory_bytes,
            }
            for batch in measured.batches
        ],
        "stopped": measured.stopped,
        "core_layouts": [
            {
                "sessions": layout.sessions,
                "threads": layout.threads,
                "rows": layout.rows,
                "rows_per_second": layout.rows_per_second,
                "ms_alone": layout.alone_seconds * 1e3,
            }
            for layout in measured.layouts
        ],
        "better_core_layout": None
        if (better := better_layout(measured.layouts)) is None
        else {"instances": better.sessions, "threads": better.threads},
    }


def _bound(batches: Sequence[BatchTime], seconds: float) -> dict[str, Any]:
    found = within(batches, seconds)
    return {
        "ms": seconds * 1e3,
        "alone": _admitted(found.alone),
        "after_another_batch": _admitted(found.after_another),
    }


def _admitted(batch: BatchTime | None) -> dict[str, Any] | None:
    if batch is None:
        return None
    return {"rows": batch.rows, "ms": batch.seconds * 1e3, "rows_per_second": batch.rows_per_second}
