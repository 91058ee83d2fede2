"""Inspections as JSON. The form is documented in docs/guides/serving.md; fields are added, never changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tensorferry.server.onnx.inspection.inspection import Inspection
from tensorferry.server.onnx.measuring.batch_sizes import BEST_RULE, within
from tensorferry.server.onnx.measuring.batch_times import BatchTime
from tensorferry.server.onnx.measuring.core_layouts import better_layout
from tensorferry.server.onnx.measuring.measurements import Measurements
from tensorferry.server.signature import TensorSpec

# The version of the form.
FORM = 1

_BATCH = ("rows", "ms", "ms_per_row", "rows_per_second", "runs", "memory_bytes")
_ADMITTED = ("rows", "ms", "rows_per_second")
_LAYOUT = ("sessions", "threads", "rows", "rows_per_second", "ms_alone")


def json_of(models: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the whole output for models as `model_of` or `failure_of` returns them."""
    return {"form": FORM, "models": list(models)}


def failure_of(argument: str, error: Exception) -> dict[str, Any]:
    """Return what is said of a MODEL that cannot be loaded."""
    return {"argument": argument, "loaded": False, "error": str(error)}


def model_of(argument: str, found: Inspection, bounds: Sequence[float]) -> dict[str, Any]:
    """Return what is known of a model. `bounds` are bounds of latency in seconds."""
    decision, signature, best = found.decision, found.signature, found.best
    return {
        "argument": argument,
        "loaded": True,
        "name": found.name,
        "version": found.version,
        "file": str(found.path),
        "kind": found.kind,
        "inputs": [_tensor(spec) for spec in signature.inputs],
        "optional_inputs": [_tensor(spec) for spec in signature.optional],
        "outputs": [_tensor(spec) for spec in signature.outputs],
        "probable_states": found.states,
        "devices": found.devices,
        "nodes_by_provider": found.nodes,
        "batching": {
            **_fields(decision, ("verdict", "description", "max_batch_size")),
            "shares_batches": decision.merges,
            **_fields(decision, ("reason", "evidence", "rewritten")),
            "cures": decision.remedies,
        },
        "measured": None if found.measured is None else _measured(found.measured),
        "not_measured": found.not_measured,
        "best_batch_size": None if best is None else best.rows,
        "best_rule": BEST_RULE,
        "full_batch_rows": found.full_rows,
        "latency_bounds": [_bound(found.batches, seconds) for seconds in bounds if found.batches],
    }


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "datatype": spec.datatype.name,
        "shape": None if spec.any_rank else list(spec.shape),
        "counts_rows": spec.has_row_axis,
        "batch_axis": spec.batch_axis if spec.has_row_axis else None,
    }


def _measured(measured: Measurements) -> dict[str, Any]:
    better = better_layout(measured.layouts)
    return {
        "device": measured.devices[0] if measured.devices else "",
        **_fields(measured, ("memory", "loaded_bytes", "lengths", "padding_waste")),
        "batches": [_fields(batch, _BATCH) for batch in measured.batches],
        "stopped": measured.stopped,
        "core_layouts": [_fields(layout, _LAYOUT) for layout in measured.layouts],
        "better_core_layout": better and {"instances": better.sessions, "threads": better.threads},
    }


def _bound(batches: Sequence[BatchTime], seconds: float) -> dict[str, Any]:
    alone, after_another = within(batches, seconds)
    return {
        "ms": seconds * 1e3,
        "alone": _fields(alone, _ADMITTED),
        "after_another_batch": _fields(after_another, _ADMITTED),
    }


def _fields(record: object, names: Sequence[str]) -> Any:
    """Return these fields and properties of a record; None if there is none."""
    return record and {name: getattr(record, name) for name in names}
