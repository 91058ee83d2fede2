"""Batching of a model whose first axis is fixed to 1, by a copy in which the axis is variable."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from tensorferry.server.batching_check.decision import Candidate, Decided, decision_for_copy
from tensorferry.server.batching_check.verdict import BatchingVerdict
from tensorferry.server.errors import StartError
from tensorferry.server.onnx_graph.batch_first import batch_first
from tensorferry.server.onnx_graph.free_rows import NotFreed, free_rows
from tensorferry.server.runtime.check_cache import CheckCache
from tensorferry.server.runtime.fp16 import ModelFile, model_file
from tensorferry.server.runtime.ort_options import OrtOptions
from tensorferry.server.runtime.sampling import Array, Run
from tensorferry.server.runtime.session import Session
from tensorferry.server.telemetry.load_progress import set_load_stage

_log = logging.getLogger("tensorferry.server")


@dataclass(frozen=True, slots=True)
class RewrittenModel:
    """The copy, its first session and the options of its sessions, and how it is batched; as in `PreparedModel`."""

    file: ModelFile
    session: Session
    ort_options: OrtOptions
    decided: Decided
    cache: CheckCache


def rewritten(
    model: Candidate, file: ModelFile, options: OrtOptions, scratch: ExitStack
) -> RewrittenModel | tuple[str, ...]:
    """Return the model that is served from a copy, or the reasons why it is not; none if nothing was tried.

    The copy must be proved, and its batches must give what the file's session gives for each row alone. Nothing is tried
    if an input has a variable first axis, because requests may use it for lengths, or if the configuration has shapes.
    """
    signature, config, requested = model.signature, model.server_config, model.requested
    if not config.batching_rewrite or not config.max_batch_size or signature.no_batch_axis_reason() is None:
        return ()
    if requested is not None and (requested.input or requested.output or requested.model_warmup):
        return ()
    if any(spec.has_row_axis for spec in signature.inputs) or not any(
        spec.dims[:1] == (1,) for spec in signature.inputs
    ):
        return ()
    set_load_stage("making its first axis variable")
    try:
        copy = _checked(model, file, replace(options, freed=free_rows(file.source)), scratch)
    except NotFreed as error:
        return error.reasons
    if isinstance(copy, RewrittenModel):
        _log.info(
            "model %s: its first axis is fixed to 1; it is rewritten with a variable one, and batches give the file's answers "
            "(--batching-rewrite false serves the file as it is)",
            model.name,
        )
    return copy


def with_batch_first(
    model: Candidate, file: ModelFile, options: OrtOptions, scratch: ExitStack
) -> RewrittenModel | tuple[str, ...]:
    """Return the same for a copy in which the batch axis of each tensor is its first. No server serves it by itself."""
    try:
        return _checked(model, file, replace(options, freed=batch_first(file.source)), scratch)
    except NotFreed as error:
        return error.reasons


def _checked(
    model: Candidate, file: ModelFile, options: OrtOptions, scratch: ExitStack
) -> RewrittenModel | tuple[str, ...]:
    """Write the copy, and compare its batches with rows that the file runs alone."""
    assert options.freed is not None
    try:
        copied = model_file(file.source, options, scratch)
        # The file's session is needed for the comparison, so both are in memory.
        session = copied.session(model.session.device, options)
        session.limit_memory()
    except StartError as error:
        return (str(error),)
    axes = {moved.name: moved.axis for moved in options.freed.axes}
    run_alone = partial(_run_with_moved_axes, model.run, axes)
    # Of its own, because what the checks of another copy of the file found does not hold for this one.
    cache = CheckCache(file.source, options, model.cache.devices)
    copy = replace(
        model,
        session=session,
        signature=session.signature,
        run=session.run,
        run_alone=run_alone,
        cache=cache,
    )
    reason = session.signature.no_batch_axis_reason()
    if reason is not None:
        return (reason,)
    set_load_stage("checking whether rows of a batch affect each other")
    found = copy.check(model.server_config.max_batch_size)
    if found.verdict is not BatchingVerdict.PROVED:
        return (found.reason,)
    if found.working_size is None:
        return (
            "it does not run on random input, so its batches could not be compared with the file's answers",
        )
    decided = Decided(decision_for_copy(copy, found), found.working_size, found.seconds)
    return RewrittenModel(copied, session, options, decided, cache)


def _run_with_moved_axes(run: Run, axes: Mapping[str, int], inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Run the file on inputs of the copy; return outputs of the copy. `axes` are the batch axes in the file."""
    outputs = run({name: _moved(array, 0, axes.get(name, 0)) for name, array in inputs.items()})
    return {name: _moved(array, axes.get(name, 0), 0) for name, array in outputs.items()}


def _moved(array: Array, source: int, target: int) -> Array:
    return np.ascontiguousarray(np.moveaxis(array, source, target)) if source != target else array
