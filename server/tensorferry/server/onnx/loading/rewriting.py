"""Batching of a model by a copy of its file: its batch axis is fixed to 1, or is not the first axis of each tensor."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np

from tensorferry.server.errors import StartError
from tensorferry.server.observability.logs.load_progress import set_load_stage
from tensorferry.server.onnx.batching.decision import Candidate, Decided, decision_for_copy
from tensorferry.server.onnx.batching.verdict import BatchingVerdict
from tensorferry.server.onnx.graph.rewriting.batch_first import batch_first
from tensorferry.server.onnx.graph.rewriting.changes import FreedRows, MovedAxis, NodeChange, NotFreed
from tensorferry.server.onnx.graph.rewriting.free_rows import free_rows
from tensorferry.server.runtime.checks.check_cache import CheckCache
from tensorferry.server.runtime.checks.sampling import Array, Run
from tensorferry.server.runtime.files.fp16 import ModelFile, model_file
from tensorferry.server.runtime.ort_options import OrtOptions
from tensorferry.server.runtime.session import Session

_log = logging.getLogger("tensorferry.server")

_CHANGES: Mapping[str, Callable[..., NodeChange]] = {kind.__name__: kind for kind in get_args(NodeChange)}


@dataclass(frozen=True, slots=True)
class RewrittenModel:
    """The copy, its first session and the options of its sessions, and how it is batched; as in `PreparedModel`.

    `batch_axes` are those of the file's tensors that are not the first, by name. The copy's tensors have them first.
    """

    file: ModelFile
    session: Session
    ort_options: OrtOptions
    decided: Decided
    cache: CheckCache
    batch_axes: Mapping[str, int]


def rewritten(
    model: Candidate, file: ModelFile, options: OrtOptions, scratch: ExitStack, *, moves_axes: bool
) -> RewrittenModel | tuple[str, ...]:
    """Return the model that is served from a copy, or the reasons why it is not; none if nothing was tried.

    The copy must be proved, and its batches must give what the file's session gives for each row alone. Nothing is tried
    if the configuration has shapes. Rows are on axis 0 unless it `moves_axes`.
    """
    signature, config, requested = model.signature, model.server_config, model.requested
    if not config.batching_rewrite or not config.max_batch_size:
        return ()
    if requested is not None and (requested.input or requested.output or requested.model_warmup):
        return ()
    set_load_stage("rewriting it with a variable batch axis")
    changes: dict[str, Callable[[Path], FreedRows]] = {}
    first_axes = [spec.dims[0] for spec in signature.inputs if spec.dims]
    # Requests may use a variable first axis of another input for lengths.
    if 1 in first_axes and all(isinstance(dim, int) for dim in first_axes):
        changes["free rows"] = free_rows
    if moves_axes:
        changes["batch first"] = partial(batch_first, has_time=partial(model.budget.allows, 1))
    reasons: list[str] = []
    for kind, change in changes.items():
        try:
            freed = _found(model, file.source, kind, change)
            copy = _checked(model, file, replace(options, freed=freed), scratch)
        except NotFreed as error:
            reasons += error.reasons
            continue
        if isinstance(copy, RewrittenModel):
            axes = ", ".join(f"{axis} of {name!r}" for name, axis in copy.batch_axes.items())
            _log.info(
                "model %s: it is rewritten with a variable batch axis%s, and batches give the file's answers%s "
                "(--batching-rewrite false serves the file as it is)",
                model.name,
                f", which is axis {axes} and the first of its other tensors" if axes else "",
                "; clients cannot send its inputs that have defaults" if freed.keeps_defaults else "",
            )
            return copy
        reasons += copy
    return tuple(dict.fromkeys(reasons))


def _found(model: Candidate, source: Path, kind: str, change: Callable[[Path], FreedRows]) -> FreedRows:
    """Return the changes of a kind, of an earlier load if it found them. Raises NotFreed if there are none."""
    kept = model.cache.get("rewriting", kind)
    if isinstance(kept, dict) and "reasons" in kept:
        raise NotFreed(*map(str, kept["reasons"]))
    if (freed := _from_json(kept)) is not None:
        return freed
    try:
        freed = change(source)
    except NotFreed as error:
        # Without time, or after another error, such as a MemoryError, the next load may find more.
        if not model.budget.ran_out and error.__cause__ is None:
            model.cache.put("rewriting", kind, {"reasons": error.reasons})
        raise
    model.cache.put("rewriting", kind, _to_json(freed))
    return freed


def _to_json(freed: FreedRows) -> Mapping[str, Any]:
    return {
        "inputs": freed.inputs,
        "nodes": [(type(node).__name__, *astuple(node)) for node in freed.nodes],
        "axes": [astuple(axis) for axis in freed.axes],
        "keeps_defaults": freed.keeps_defaults,
    }


def _from_json(kept: Any) -> FreedRows | None:
    """Return changes that `_to_json` returned; None if it is something else."""
    try:
        return FreedRows(
            tuple(kept["inputs"]),
            tuple(_CHANGES[kind](*map(_with_tuples, values)) for kind, *values in kept["nodes"]),
            tuple(MovedAxis(*values) for values in kept["axes"]),
            kept["keeps_defaults"],
        )
    except (KeyError, TypeError, ValueError):
        return None


def _with_tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


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
    return RewrittenModel(copied, session, options, decided, cache, axes)


def _run_with_moved_axes(run: Run, axes: Mapping[str, int], inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Run the file on inputs of the copy; return outputs of the copy. `axes` are the batch axes in the file."""
    outputs = run({name: _moved(array, 0, axes.get(name, 0)) for name, array in inputs.items()})
    return {name: _moved(array, axes.get(name, 0), 0) for name, array in outputs.items()}


def _moved(array: Array, source: int, target: int) -> Array:
    return np.ascontiguousarray(np.moveaxis(array, source, target)) if source != target else array
