"""Inspection of a model: loads it as the server does, and measures batches of it."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from tensorferry.server.batching_check.cures import fixed_first_axes
from tensorferry.server.batching_check.decision import Candidate
from tensorferry.server.config.server_config import PYTHON_SUFFIX, ModelSource, ServerConfig
from tensorferry.server.cores import usable_cores
from tensorferry.server.errors import StartError
from tensorferry.server.inspection.core_layouts import Layout, layouts_of
from tensorferry.server.inspection.loaded_models import loaded_models
from tensorferry.server.inspection.measuring import (
    Measurements,
    lengths_of,
    measure_file,
    measure_model,
)
from tensorferry.server.inspection.measuring_child import MeasuredModel
from tensorferry.server.inspection.model_argument import source_in
from tensorferry.server.inspection.variable_axis import NoCopy, copy_name, write_copy
from tensorferry.server.model_config.ensembles import is_ensemble
from tensorferry.server.model_config.pbtxt import BatchingDecision
from tensorferry.server.models.declared_sources import declared_source, declared_sources, named_steps
from tensorferry.server.models.loader import declared_onnx
from tensorferry.server.models.registry import Model
from tensorferry.server.onnx_graph.free_rows import FreedRows, NotFreed, write_freed
from tensorferry.server.onnx_models.preparation import PreparedModel, prepare_model
from tensorferry.server.onnx_models.rewriting import RewrittenModel, with_batch_first
from tensorferry.server.runtime.devices import choose_device
from tensorferry.server.scratch_directory import ScratchDirectory
from tensorferry.server.signature import Signature
from tensorferry.serving import FunctionModel, OnnxModel, PipelineModel

# Sizes that are measured by default: powers of two up to this, or to --max-batch-size if that is more.
_LARGEST = 64


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to measure. `sizes` ascend; None for the default ones. All sizes of a model may take `seconds` together.

    `length` is that of variable axes other than the batch axis; None for one with which the model runs. `lengths` has those
    of axes by name, which precede. `write_batched` is where to write the copy of a model that is rewritten.
    """

    measure: bool = True
    sizes: tuple[int, ...] | None = None
    seconds: float = 60.0
    length: int | None = None
    lengths: Mapping[str, int] = field(default_factory=dict)
    write_batched: Path | None = None


@dataclass(frozen=True, slots=True)
class TriedCopy:
    """A copy of the file with a variable first axis: the command that makes it, and how the loader would batch it.

    `error` says why there is none; `decision` is None then.
    """

    command: str = ""
    decision: BatchingDecision | None = None
    error: str = ""

    @property
    def batched(self) -> bool:
        """Whether requests for the copy would share batches."""
        return self.decision is not None and self.decision.merges


@dataclass(frozen=True, slots=True)
class BatchFirst:
    """A copy of the file in which the batch axis of each tensor is its first: how it is batched, and its tensors."""

    decision: BatchingDecision
    signature: Signature


@dataclass(frozen=True, slots=True)
class Inspection:
    """What is known of a model. `kind` is onnx, function, pipeline or ensemble.

    `decision` is the loader's. `copy` is what was tried if the first axis is fixed. `measured` is None if nothing was
    measured; `not_measured` then says why. `measured_copy` says that the copy was measured. `batch_first` is None unless the
    model is not batched, and only because the batch axis is not the first of each tensor.
    """

    name: str
    version: str
    path: Path
    kind: str
    signature: Signature
    decision: BatchingDecision
    devices: tuple[str, ...]
    copy: TriedCopy | None = None
    measured: Measurements | None = None
    not_measured: str = ""
    measured_copy: bool = False
    batch_first: BatchFirst | None = None

    @property
    def cures(self) -> Sequence[str]:
        """What to change so that requests share batches, the simplest first."""
        if self.batch_first is not None:
            return (
                f"serve a file in which the batch axis of each tensor is its first, which is {self.batch_first.decision.verdict}; "
                f"--write-batched OUT.onnx writes it: {self.batch_first.signature}",
                *self.decision.cures,
            )
        if self.copy is None or self.copy.decision is None:
            return self.decision.cures
        if self.copy.batched:
            verdict = self.copy.decision.verdict
            enough = f"make the first axis variable in the file; it is then {verdict}: {self.copy.command}"
            return (enough, *self.decision.cures)
        # What stands in the way of the copy does so after another export, too.
        return tuple(dict.fromkeys((*self.decision.cures, *self.copy.decision.cures)))


def inspect_model(source: ModelSource, config: ServerConfig, wanted: Wanted) -> Iterator[Inspection]:
    """Inspect a model; yield all models of a Python file. StartError if one cannot be loaded."""
    ensemble = source.config is not None and is_ensemble(source.config)
    if not ensemble and source.path.suffix != PYTHON_SUFFIX:
        yield _inspect_file(source, config, wanted)
        return
    if wanted.write_batched is not None:
        raise StartError(f"{source.path}: --write-batched takes an ONNX file")
    if ensemble:
        yield from _inspect_loaded([*_composing(source), source], source.name, config, wanted)
    else:
        sources = declared_sources([source]) if source.directory is None else [declared_source(source)]
        yield from _inspect_loaded(sources, None, config, wanted)


def _inspect_file(source: ModelSource, config: ServerConfig, wanted: Wanted) -> Inspection:
    device = choose_device(config.device)
    with ExitStack() as scratch:
        # No request waits, so rows are compared to the end.
        prepared = prepare_model(source, config, device, scratch, unlimited=True)
        copied: PreparedModel | None = None
        copy: TriedCopy | None = None
        if _lacks_only_the_axis(prepared):
            copy, copied = _try_copy(source, config, device, scratch, prepared.session.signature)
        moved: RewrittenModel | None = None
        if prepared.batching.verdict in ("off", "refused") and (copy is None or not copy.batched):
            moved = _batch_first(source, prepared, config, scratch)
        if wanted.write_batched is not None:
            options = prepared.settings.ort_options if moved is None else moved.ort_options
            _write_batched(prepared, options.freed, wanted.write_batched)
        found = Inspection(
            source.name,
            source.version,
            source.path,
            _kind_of(source),
            prepared.io_mapping.signature,
            prepared.batching,
            prepared.settings.devices,
            copy,
            batch_first=None
            if moved is None
            else BatchFirst(moved.decided.batching, moved.session.signature),
        )
        measured_copy = copied is not None and copied.batching.merges
        shown = copied if measured_copy and copied is not None else prepared
        if not wanted.measure:
            return replace(found, not_measured="--no-measure")
        length = wanted.length or shown.working_size
        if length is None:
            advice = "; --length gives its axes other lengths" if lengths_of(found.signature, 0, {}) else ""
            return replace(found, not_measured=f"it does not run on random input{advice}")
        _check_axes(found.signature, wanted.lengths)
        model = MeasuredModel(
            shown.file,
            shown.settings.devices[0],
            shown.settings.ort_options,
            shown.io_mapping,
            length,
            _sizes(shown.io_mapping.signature, shown.batching, wanted),
            wanted.seconds,
            dict(wanted.lengths),
            _layouts(shown),
        )
        # The process that measures loads the model again, and a GPU may not hold it twice.
        del prepared, copied, shown
        gc.collect()
        return replace(found, measured=measure_file(model), measured_copy=measured_copy)


def _layouts(prepared: PreparedModel) -> tuple[Layout, ...]:
    """Return the layouts of the cores to measure; none if the operator has chosen one, or the model runs on GPUs."""
    settings = prepared.settings
    chosen = len(settings.devices) > 1 or settings.ort_options.intra_op_threads
    return () if chosen or settings.devices[0] != "cpu" else layouts_of(usable_cores())


def _lacks_only_the_axis(prepared: PreparedModel) -> bool:
    """Return whether the model is not batched because a first dimension is fixed."""
    signature = prepared.session.signature
    reason = signature.no_batch_axis_reason()
    fixed = fixed_first_axes((*signature.inputs, *signature.outputs))
    return bool(fixed) and reason is not None and prepared.batching.reason.startswith(reason)


def _batch_first(
    source: ModelSource, prepared: PreparedModel, config: ServerConfig, scratch: ExitStack
) -> RewrittenModel | None:
    """Return a proved copy in which the batch axis of each tensor is its first, if there is one."""
    if not config.max_batch_size:
        return None
    session = prepared.session
    candidate = Candidate(
        source.name,
        session,
        session.signature,
        session.run,
        source.config,
        config,
        prepared.precision,
        prepared.cache,
        prepared.budget,
    )
    found = with_batch_first(candidate, prepared.file, prepared.settings.ort_options, scratch)
    return found if isinstance(found, RewrittenModel) else None


def _write_batched(prepared: PreparedModel, freed: FreedRows | None, path: Path) -> None:
    """Write the copy that is batched; StartError if there is none."""
    source = prepared.file.source
    if freed is None:
        why = prepared.batching.reason or "it is batched as it is"
        raise StartError(f"{source}: --write-batched has nothing to write: {why}")
    if path.exists() and path.samefile(source):
        raise StartError(f"{source}: --write-batched would replace the model; give another file")
    try:
        write_freed(source, freed, path)
    except (NotFreed, OSError) as error:
        raise StartError(f"{source}: {path} cannot be written: {error}") from error


def _try_copy(
    source: ModelSource, config: ServerConfig, device: str, scratch: ExitStack, signature: Signature
) -> tuple[TriedCopy, PreparedModel | None]:
    folder = ScratchDirectory()
    scratch.callback(folder.remove)
    path = folder.path / source.path.name
    try:
        # A file that was fetched is in a cache, in which the command must write nothing.
        made = None if source.keep_alive is None else Path(copy_name(source.path))
        command = write_copy(source.path, signature, path, made)
        prepared = prepare_model(replace(source, path=path), config, device, scratch, unlimited=True)
    except (NoCopy, StartError) as error:
        return TriedCopy(error=str(error).replace(str(path), str(source.path))), None
    return TriedCopy(command, prepared.batching), prepared


def _sizes(signature: Signature, decision: BatchingDecision, wanted: Wanted) -> tuple[int, ...]:
    if not decision.max_batch_size and signature.no_batch_axis_reason() is not None:
        # Requests have no rows.
        return (1,)
    if wanted.sizes is not None:
        return wanted.sizes
    sizes = [1]
    while sizes[-1] * 2 <= max(_LARGEST, decision.max_batch_size):
        sizes.append(sizes[-1] * 2)
    return tuple(sizes)


def _check_axes(signature: Signature, lengths: Mapping[str, int]) -> None:
    """Raise StartError if a length is given for an axis that the inputs do not have."""
    known = [name for name in lengths_of(signature, 0, {}) if "[" not in name]
    for name in lengths:
        if name not in known:
            raise StartError(
                f"--length names the axis {name!r}; the inputs have {', '.join(map(repr, known)) or 'no variable axes'} "
                "besides the batch axis"
            )


def _composing(source: ModelSource) -> Sequence[ModelSource]:
    """Return the models that an ensemble names, which are beside it in its repository, each after those that it uses."""
    found: dict[str, ModelSource] = {}

    def add(user: ModelSource) -> None:
        for name in named_steps(user):
            if name not in found and user.directory is not None and name != source.name:
                named = source_in(user.directory.parent / name)
                add(named)
                found[name] = declared_source(named)

    add(source)
    return list(found.values())


def _inspect_loaded(
    sources: Sequence[ModelSource], only: str | None, config: ServerConfig, wanted: Wanted
) -> Iterator[Inspection]:
    """Load models that may use each other; yield what is known of all, or of one."""
    for source, model in loaded_models(sources, config):
        if only is not None and source.name != only:
            continue
        if isinstance(source.declaration, OnnxModel):
            file, options = declared_onnx(source, source.declaration, config.for_model(source.name))
            yield replace(_inspect_file(file, options, wanted), name=source.name)
        else:
            yield _inspect_running(source, model, wanted)


def _inspect_running(source: ModelSource, model: Model, wanted: Wanted) -> Inspection:
    decision = BatchingDecision(
        model.max_batch_size, model.max_batch_size > 1, model.batching, model.batching_verdict
    )
    found = Inspection(
        model.name, model.version, source.path, _kind_of(source), model.signature, decision, model.devices
    )
    if not wanted.measure:
        return replace(found, not_measured="--no-measure")
    sizes = _sizes(model.signature, decision, wanted)
    measured, reason = measure_model(model, sizes, wanted.seconds, wanted.length, wanted.lengths)
    return replace(found, measured=measured, not_measured=reason)


def _kind_of(source: ModelSource) -> str:
    if source.config is not None and is_ensemble(source.config):
        return "ensemble"
    if isinstance(source.declaration, PipelineModel):
        return "pipeline"
    return "function" if isinstance(source.declaration, FunctionModel) else "onnx"
