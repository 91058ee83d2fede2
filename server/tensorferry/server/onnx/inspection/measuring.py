"""Measuring of a model's batches: an ONNX file in a process of its own, other models through their batcher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tensorferry.server.errors import ModelFailedError, StepFailedError
from tensorferry.server.models.lifecycle.registry import Model
from tensorferry.server.onnx.inspection.batch_times import BatchTime, UnknownMemory, time_batches
from tensorferry.server.onnx.inspection.core_layouts import LayoutTime, better_layout
from tensorferry.server.onnx.inspection.measuring_child import LATE, LOAD_SECONDS, MeasuredModel, measure
from tensorferry.server.processes.child import Outcome, run_in_child
from tensorferry.server.runtime.checks.sampling import Array, random_inputs, working_size
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

    @property
    def better_layout(self) -> LayoutTime | None:
        """The layout that carries clearly more rows than one session; None if none does."""
        return better_layout(self.layouts)


def lengths_of(signature: Signature, size: int, lengths: Mapping[str, int]) -> dict[str, int]:
    """Return the lengths of variable axes as `Measurements` has them, given the one of all and those of some."""
    found = {}
    for spec in signature.inputs:
        for axis, dim in enumerate(spec.dims):
            if axis and isinstance(dim, str):
                found[dim or f"{spec.name}[{axis}]"] = lengths.get(dim, size)
    return found


def measure_file(model: MeasuredModel) -> Measurements:
    """Measure an ONNX model in a child process. Sizes that were measured before the process died are kept."""
    outcome = run_in_child(measure, model, LOAD_SECONDS, LATE * model.seconds + 1)
    batches = tuple(BatchTime(**message) for message in outcome.sent if "rows" in message)
    loaded: dict[str, Any] = next((message for message in outcome.sent if "loaded_bytes" in message), {})
    stopped = next((message["stopped"] for message in outcome.sent if "stopped" in message), None)
    return Measurements(
        (model.device,),
        batches,
        loaded.get("memory", ""),
        loaded.get("loaded_bytes"),
        _death(outcome, len(batches), model) if stopped is None else stopped,
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


def measure_model(
    model: Model, sizes: Sequence[int], seconds: float, length: int | None, lengths: Mapping[str, int]
) -> tuple[Measurements | None, str]:
    """Measure a loaded function or pipeline through its batcher. Return None and the reason if it cannot be run.

    `length` is that of variable axes, or one that works if it is None; `lengths` has those of axes by name.
    """
    submit = model.batcher.submit_rows if model.batched else model.batcher.submit

    def run(inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        try:
            outputs: Mapping[str, Array] = submit(inputs).result(seconds)
        except Exception as error:
            reason = error.reason if isinstance(error, StepFailedError) else str(error)
            raise ModelFailedError(reason or type(error).__name__) from None
        return outputs

    size, reason = (length, "") if length is not None else working_size(model.signature, run)
    if size is None:
        return None, f"it does not run on random input: {reason}"
    batches: list[BatchTime] = []
    stopped = time_batches(
        run,
        lambda rows: random_inputs(model.signature, rows, size, sizes=lengths),
        [rows for rows in sizes if rows <= max(1, model.max_batch_size)],
        batches.append,
        memory=UnknownMemory(),
        seconds=seconds,
    )
    used = lengths_of(model.signature, size, lengths)
    counts = model.batcher.statistics()
    waste = counts.padding_waste if counts.positions else None
    return Measurements(model.devices, tuple(batches), stopped=stopped, lengths=used, padding_waste=waste), ""
