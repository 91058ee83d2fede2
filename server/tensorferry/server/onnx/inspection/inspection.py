"""Inspection of a model: loads it as the server does, and measures batches of it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from tensorferry.server.config.server_config import PYTHON_SUFFIX, ModelSource, ServerConfig
from tensorferry.server.errors import StartError
from tensorferry.server.models.config_pbtxt.ensembles import is_ensemble
from tensorferry.server.models.config_pbtxt.pbtxt import BatchingDecision
from tensorferry.server.models.lifecycle.loader import declared_onnx
from tensorferry.server.models.lifecycle.model import Model
from tensorferry.server.models.repository.declared_sources import (
    declared_source,
    declared_sources,
    named_steps,
)
from tensorferry.server.onnx.graph.rewriting.changes import NotFreed, write_freed
from tensorferry.server.onnx.inspection.loaded_model import measure_model
from tensorferry.server.onnx.inspection.model_argument import loaded_models, source_in
from tensorferry.server.onnx.inspection.probable_states import probable_states
from tensorferry.server.onnx.loading.preparation import PreparedModel, prepare_model
from tensorferry.server.onnx.measuring.batch_sizes import best_size, full_batch
from tensorferry.server.onnx.measuring.batch_times import BatchTime
from tensorferry.server.onnx.measuring.core_layouts import Layout, layouts_of
from tensorferry.server.onnx.measuring.measurements import Measurements, lengths_of, measure_file
from tensorferry.server.onnx.measuring.measuring_child import MeasuredModel
from tensorferry.server.runtime.checks.load_budget import LoadBudget
from tensorferry.server.runtime.checks.sampling import working_size
from tensorferry.server.runtime.devices import choose_device
from tensorferry.server.signature import Signature
from tensorferry.server.system.cores import usable_cores
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
class Inspection:
    """What is known of a model. `kind` is onnx, function, pipeline or ensemble.

    `decision` is the loader's. `nodes` has the number of nodes of each operator by the execution provider that runs them; empty
    if all run on ONNX Runtime's own CPU provider. `measured` is None if nothing was measured; `not_measured` then says why.
    """

    name: str
    version: str
    path: Path
    kind: str
    signature: Signature
    decision: BatchingDecision
    devices: tuple[str, ...]
    nodes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    measured: Measurements | None = None
    not_measured: str = ""

    @property
    def states(self) -> Mapping[str, str]:
        """The outputs that seem to be the next values of inputs, by these."""
        return probable_states(self.signature) if self.kind == "onnx" else {}

    @property
    def batches(self) -> tuple[BatchTime, ...]:
        """The times of batches, whose sizes ascend."""
        return () if self.measured is None else self.measured.batches

    @property
    def best(self) -> BatchTime | None:
        """The best batch by these times; None if nothing was measured."""
        return best_size(self.batches)

    @property
    def full_rows(self) -> int | None:
        """The rows of a full batch by these times; None if requests share no batches."""
        return full_batch(self.batches, self.decision.max_batch_size) if self.decision.merges else None


def inspect_model(source: ModelSource, config: ServerConfig, wanted: Wanted) -> Iterator[Inspection]:
    """Inspect a model; yield all models of a Python file. StartError if one cannot be loaded."""
    ensemble = source.config is not None and is_ensemble(source.config)
    if not ensemble and source.path.suffix != PYTHON_SUFFIX:
        yield _inspect_file(source, config, wanted)
        return
    if wanted.write_batched is not None:
        raise StartError(f"{source.path}: --write-batched takes an ONNX file")
    if ensemble:
        sources: Sequence[ModelSource] = [*_composing(source), source]
    else:
        sources = declared_sources([source]) if source.directory is None else [declared_source(source)]
    axes: set[str] = set()
    for each, model in loaded_models(sources, config):
        if ensemble and each.name != source.name:
            continue
        # Each model has axes of its own.
        own = {name: wanted.lengths[name] for name in _axes(model.signature) if name in wanted.lengths}
        axes.update(_axes(model.signature))
        of_model = replace(wanted, lengths=own)
        if isinstance(each.declaration, OnnxModel):
            file, options = declared_onnx(each, each.declaration, config.for_model(each.name))
            yield replace(_inspect_file(file, options, of_model), name=each.name)
        else:
            yield _inspect_running(each, model, of_model)
    _check_axes(axes, wanted.lengths)


def _inspect_file(source: ModelSource, config: ServerConfig, wanted: Wanted) -> Inspection:
    device = choose_device(config.device)
    with ExitStack() as scratch:
        # No request waits, so rows are compared to the end.
        prepared = prepare_model(source, config, device, scratch, new_budget=partial(LoadBudget, math.inf))
        if wanted.write_batched is not None:
            _write_batched(prepared, wanted.write_batched)
        signature, settings = prepared.io_mapping.signature, prepared.settings
        known = (_kind_of(source), signature, prepared.batching, settings.devices)
        placed = prepared.session.nodes_by_provider()
        found = Inspection(source.name, source.version, source.path, *known, nodes=placed)
        if not wanted.measure:
            return replace(found, not_measured="--no-measure")
        _check_axes(_axes(signature), wanted.lengths)
        length = wanted.length or prepared.working_size
        if length is None and wanted.lengths:
            length, _ = working_size(
                signature, prepared.io_mapping.runner(prepared.session.run), wanted.lengths
            )
        if length is None:
            advice = "; --length gives its axes other lengths" if lengths_of(signature, 0, {}) else ""
            return replace(found, not_measured=f"it does not run on random input{advice}")
        model = MeasuredModel(
            prepared.file,
            settings.devices[0],
            settings.ort_options,
            prepared.io_mapping,
            length,
            _sizes(signature, prepared.batching, wanted),
            wanted.seconds,
            dict(wanted.lengths),
            _layouts(prepared),
        )
        # The process that measures loads the model again, and a GPU may not hold it twice.
        del prepared
        return replace(found, measured=measure_file(model))


def _layouts(prepared: PreparedModel) -> tuple[Layout, ...]:
    """Return the layouts of the cores to measure; none if the operator has chosen one, or the model runs on GPUs."""
    settings = prepared.settings
    chosen = len(settings.devices) > 1 or settings.ort_options.intra_op_threads
    return () if chosen or settings.devices[0] != "cpu" else layouts_of(usable_cores())


def _write_batched(prepared: PreparedModel, path: Path) -> None:
    """Write the copy that is batched; StartError if there is none."""
    source, freed = prepared.file.source, prepared.settings.ort_options.freed
    if freed is None:
        why = prepared.batching.reason or "it is batched as it is"
        raise StartError(f"{source}: --write-batched has nothing to write: {why}")
    if path.exists() and path.samefile(source):
        raise StartError(f"{source}: --write-batched would replace the model; give another file")
    try:
        write_freed(source, freed, path)
    except (NotFreed, OSError) as error:
        raise StartError(f"{source}: {path} cannot be written: {error}") from error


def _sizes(signature: Signature, decision: BatchingDecision, wanted: Wanted) -> tuple[int, ...]:
    if not decision.max_batch_size and signature.no_batch_axis_reason() is not None:
        # Requests have no rows.
        return (1,)
    largest = max(_LARGEST, decision.max_batch_size)
    return wanted.sizes or tuple(1 << power for power in range(largest.bit_length()))


def _axes(signature: Signature) -> Sequence[str]:
    """Return the names of the inputs' variable axes besides the batch axis."""
    return [name for name in lengths_of(signature, 0, {}) if "[" not in name]


def _check_axes(known: Collection[str], lengths: Mapping[str, int]) -> None:
    """Raise StartError if a length is given for an axis that the inputs do not have."""
    if unknown := [name for name in lengths if name not in known]:
        raise StartError(
            f"--length names the axis {unknown[0]!r}; the inputs have {', '.join(map(repr, known)) or 'no variable axes'} "
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
