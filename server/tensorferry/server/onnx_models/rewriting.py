"""Batching of a model whose first axis is fixed to 1, by a copy in which the axis is variable."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace

from tensorferry.server.batching_check.decision import Candidate, Decided, decision_for_copy
from tensorferry.server.batching_check.verdict import BatchingVerdict
from tensorferry.server.errors import StartError
from tensorferry.server.onnx_graph.free_rows import NotFreed, free_rows
from tensorferry.server.runtime.fp16 import ModelFile, model_file
from tensorferry.server.runtime.ort_options import OrtOptions
from tensorferry.server.runtime.session import Session
from tensorferry.server.telemetry.load_progress import set_load_stage


@dataclass(frozen=True, slots=True)
class RewrittenModel:
    """The copy, its first session and the options of its sessions, and how it is batched; as in `PreparedModel`."""

    file: ModelFile
    session: Session
    ort_options: OrtOptions
    decided: Decided


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
        options = replace(options, freed=free_rows(file.source))
        copied = model_file(file.source, options, scratch)
        # The file's session is needed for the comparison, so both are in memory.
        session = copied.session(model.session.device, options)
        session.limit_memory()
    except NotFreed as error:
        return error.reasons
    except StartError as error:
        return (str(error),)
    copy = replace(model, session=session, signature=session.signature, run=session.run, run_alone=model.run)
    reason = session.signature.no_batch_axis_reason()
    if reason is not None:
        return (reason,)
    set_load_stage("checking whether rows of a batch affect each other")
    found = copy.check(config.max_batch_size)
    if found.verdict is not BatchingVerdict.PROVED:
        return (found.reason,)
    if found.working_size is None:
        return (
            "it does not run on random input, so its batches could not be compared with the file's answers",
        )
    decided = Decided(decision_for_copy(copy, found), found.working_size, found.seconds)
    return RewrittenModel(copied, session, options, decided)
