"""Measuring of the batches of an ONNX file, in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tensorferry.server.onnx.measuring.batch_times import BatchTime
from tensorferry.server.onnx.measuring.core_layouts import LayoutTime
from tensorferry.server.onnx.measuring.measuring_child import LATE, LOAD_SECONDS, MeasuredModel, measure
from tensorferry.server.processes.child import Child, Outcome, run_in_child
from tensorferry.server.signature import Signature


@dataclass(frozen=True, slots=True)
class Measurements:
    """What batches took on a device.

    `memory` says what the `memory_bytes` of the batches are; empty if they are unknown. `loaded_bytes` is the resident
    memory that loading the model took; None if unknown. `stopped` says why larger sizes are missing; empty if none is.
    `lengths` has those of the inputs' variable axes other than the batch axis, by the axis's name, or the input and axis.
    `layouts` has what divisions of the cores into sessions carry, one session first; empty if they were not measured.
    `padding_waste` is the share of padding in the padded inputs, from 0 to 1; None if nothing was padded.
    """

    devices: tuple[str, ...]
    batches: tuple[BatchTime, ...]
    memory: str = ""
    loaded_bytes: int | None = None
    stopped: str = ""
    lengths: Mapping[str, int] = field(default_factory=dict)
    layouts: tuple[LayoutTime, ...] = ()
    padding_waste: float | None = None


def lengths_of(signature: Signature, size: int, lengths: Mapping[str, int]) -> dict[str, int]:
    """Return the lengths of variable axes as `Measurements` has them, given the one of all and those of some."""
    found = {}
    for spec in signature.inputs:
        for axis, dim in enumerate(spec.dims):
            if axis and isinstance(dim, str):
                found[dim or f"{spec.name}[{axis}]"] = lengths.get(dim, size)
    return found


def measure_file(
    model: MeasuredModel, on_start: Callable[[Child], None] = lambda child: None
) -> Measurements:
    """Measure an ONNX model in a child process. Sizes that were measured before the process died are kept.

    `on_start` gets the child, to kill it.
    """
    outcome = run_in_child(measure, model, LOAD_SECONDS, LATE * model.seconds + 1, on_start)
    batches = tuple(BatchTime(**message) for message in outcome.sent if "rows" in message)
    facts: dict[str, Any] = {name: fact for message in outcome.sent for name, fact in message.items()}
    return Measurements(
        (model.device,),
        batches,
        facts.get("memory", ""),
        facts.get("loaded_bytes"),
        facts.get("stopped", _death(outcome, len(batches), model)),
        lengths_of(model.io_mapping.signature, model.working_size, model.lengths),
        tuple(LayoutTime(**message["layout"]) for message in outcome.sent if "layout" in message),
    )


def _death(outcome: Outcome, measured: int, model: MeasuredModel) -> str:
    """Describe the end of a child that did not finish, but measured some sizes."""
    left = model.sizes[measured:]
    where = f"a batch of {left[0]} rows" if left else "the last batch"
    if outcome.late:
        return f"{where} did not end in time"
    return f"the process that measures ended at {where}: {outcome.status.description}"
