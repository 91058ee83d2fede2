"""Measuring of the batches of a loaded function or pipeline, through its batcher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tensorferry.server.errors import ModelFailedError, StepFailedError
from tensorferry.server.models.lifecycle.model import Model
from tensorferry.server.onnx.measuring.batch_times import BatchTime, time_batches
from tensorferry.server.onnx.measuring.measurements import Measurements, lengths_of
from tensorferry.server.runtime.checks.sampling import Array, random_inputs, working_size


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

    size, reason = (length, "") if length is not None else working_size(model.signature, run, lengths)
    if size is None:
        return None, f"it does not run on random input: {reason}"
    batches: list[BatchTime] = []
    stopped = time_batches(
        run,
        lambda rows: random_inputs(model.signature, rows, size, sizes=lengths),
        [rows for rows in sizes if rows <= max(1, model.max_batch_size)],
        batches.append,
        memory=None,
        seconds=seconds,
    )
    used = lengths_of(model.signature, size, lengths)
    counts = model.batcher.statistics()
    waste = counts.padding_waste if counts.positions else None
    return Measurements(model.devices, tuple(batches), stopped=stopped, lengths=used, padding_waste=waste), ""
