"""Loading of a model: its steps, their stages, and the registry's record."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tensorferry.batcher import BatcherSettings, StatefulBatcher
from tensorferry.protos.model_config_pb2 import ModelConfig
from tensorferry.server.config.option_groups.batching import PadLengths
from tensorferry.server.config.server_config import ModelSource, ServerConfig
from tensorferry.server.errors import ServerError, StartError
from tensorferry.server.models.config_pbtxt.ensembles import PLATFORM as ENSEMBLE_PLATFORM
from tensorferry.server.models.config_pbtxt.ensembles import (
    NamedModel,
    complete_ensemble,
    is_ensemble,
    named_models,
)
from tensorferry.server.models.config_pbtxt.pbtxt import BatchingDecision, complete_config
from tensorferry.server.models.config_pbtxt.supported_fields import ModelKind, check_fields
from tensorferry.server.models.lifecycle.caching import cache_of
from tensorferry.server.models.lifecycle.load_context import LoadContext
from tensorferry.server.models.lifecycle.model import Model
from tensorferry.server.models.lifecycle.sequences import with_sequences
from tensorferry.server.models.lifecycle.stages import build, instance_counts
from tensorferry.server.models.lifecycle.text_models import check_task, with_head
from tensorferry.server.models.repository.fetched_sources import fetch_declared, fetched_function
from tensorferry.server.models.repository.labels import StepLabels, read_labels
from tensorferry.server.observability.logs.exemplars import Exemplars
from tensorferry.server.observability.logs.load_progress import LoadProgress
from tensorferry.server.onnx.loading.loading import load_onnx_step
from tensorferry.server.onnx.loading.row_padding import RaggedInput
from tensorferry.server.python.models.configured import check_settings_are_declared
from tensorferry.server.python.models.loading import load_function_step
from tensorferry.server.python.steps.ensembles import ComposingModel, plan_ensemble
from tensorferry.server.python.steps.loaded_step import LoadedStep
from tensorferry.server.python.steps.named_model import ModelReference
from tensorferry.server.python.steps.planning import Plan, StepBinding, place, plan_model, plan_pipeline
from tensorferry.server.runtime.axes import EmptyAxes
from tensorferry.server.runtime.checks.sampling import varies
from tensorferry.server.runtime.checks.trial_runs import limit_trial_runs
from tensorferry.server.runtime.recovery.instance_health import InstanceHealth
from tensorferry.serving import FunctionModel, OnnxModel, PipelineModel, Step

_log = logging.getLogger("tensorferry.server")

# Verdicts of batching, the weakest first.
_VERDICTS = ("off", "refused", "trusted", "tested", "proved")


def load_model(source: ModelSource, context: LoadContext) -> Model:
    """Load a model, checked and ready for requests. StartError names the file and the reason."""
    limit = context.config.for_model(source.name).run_timeout
    with LoadProgress(f"model {source.name} version {source.version}"):
        try:
            return limit_trial_runs(source.name, limit, lambda: _load_model(source, context))
        except OSError as error:
            # Such as a directory that this process may not enter.
            raise StartError(f"model {source.name!r} cannot be loaded: {error}") from error


def _load_model(source: ModelSource, context: LoadContext) -> Model:
    declared = source.declaration
    options = context.config.for_model(source.name)
    one_file = not is_ensemble(source.config) and not isinstance(declared, (FunctionModel, PipelineModel))
    if options.state and not one_file:
        raise StartError(
            f"model {source.name!r} has the option --state, which only an ONNX model by itself can have; give it in the table "
            "[models.NAME] of that model"
        )
    if is_ensemble(source.config):
        return _load_ensemble(source, source.config, context)
    if isinstance(declared, PipelineModel):
        check_settings_are_declared(source.config, source.name, "a pipeline")
        return _load_pipeline(source, declared, context)
    if isinstance(declared, OnnxModel):
        check_settings_are_declared(source.config, source.name, "an ONNX model")
    step = _load_step(source, context)
    if not isinstance(declared, FunctionModel):
        step = with_sequences(source, step, declared, options)
    plan = plan_model(source.name, step)
    _warn_about_unreachable_batches(source.name, step, options)
    model = _model(source, plan, context, step.config, step.decision.verdict, step.batching)
    return replace(
        model,
        open_layout=source if step.open_layout else None,
        open_checks=source if step.open_checks else None,
    )


def _load_pipeline(source: ModelSource, declared: PipelineModel, context: LoadContext) -> Model:
    steps: list[StepBinding] = []
    ragged: dict[str, RaggedInput] = {}
    # They stay in the cache while they are referred to.
    copies: list[object] = []
    for step in declared.steps:
        if isinstance(step.model, FunctionModel):
            function, copy = fetched_function(step.model, context.config)
            step = replace(step, model=function)
            copies.append(copy)
        steps.append(_place_step(source, declared, step, context, ragged))
        ragged.update(_ragged_outputs(step, steps[-1]))
    plan = plan_pipeline(source.name, steps, declared.outputs)
    if declared.task is not None:
        check_task(source.name, declared.task, plan.signature)
    loaded = [placed.step for placed in steps if placed.step is not None]
    batched = {step.settings.max_batch_size > 0 for step in loaded}
    if len(batched) > 1:
        unbatched = next(step.name for step in loaded if not step.settings.max_batch_size)
        raise StartError(
            f"pipeline {source.name!r}: step {unbatched!r} has no axis of rows, but others have; give it one, or declare "
            "max_batch_size=0 for all"
        )
    batching = "; ".join(
        f"{stage.name}: {stage.steps[0].step.batching if stage.steps[0].step is not None else 'its own batches'}"
        for stage in plan.stages
    )
    named = [context.registry.find(step.used.name) for step in steps if step.used is not None]
    verdict = _weakest(
        [step.decision.verdict for step in loaded] + [model.batching_verdict for model in named]
    )
    settings = None
    if not loaded:
        most = min((model.max_batch_size for model in named if model.batched), default=0)
        settings = _settings_over(named, most, context.config.for_model(source.name))
    else:
        most = loaded[0].settings.max_batch_size
    config = _pipeline_config(source, plan, most, context)
    return _model(source, plan, context, config, verdict, batching, settings)


def _load_ensemble(source: ModelSource, given: ModelConfig, context: LoadContext) -> Model:
    """Load an ensemble. Its steps' models must be loaded."""
    for warning in check_fields(given, source.name, ModelKind.ENSEMBLE):
        _log.warning("%s", warning)
    config = complete_ensemble(given, source.name)
    models = [_composing_model(source.name, named, context) for named in named_models(config)]
    plan = plan_ensemble(
        config, [ComposingModel(model.config, model.signature, model.batched) for model in models]
    )
    options = context.config.for_model(source.name)
    settings = _settings_over(models, config.max_batch_size, options)
    _log.info("ensemble %s version %s loaded: %s", source.name, source.version, _listed(plan))
    return _model(
        source,
        plan,
        context,
        config,
        _weakest([model.batching_verdict for model in models]),
        f"the batches of its steps' models: {_listed(plan)}",
        settings,
    )


def _composing_model(ensemble: str, named: NamedModel, context: LoadContext) -> Model:
    try:
        model = context.registry.find(*named)
    except ServerError as error:
        raise StartError(
            f"ensemble {ensemble!r} depends on {named.name!r}, which does not serve: {error}"
        ) from None
    _check_fits_a_step(ensemble, model)
    return model


def _check_fits_a_step(user: str, model: Model) -> None:
    if isinstance(model.batcher, StatefulBatcher):
        raise StartError(
            f"model {user!r} has {model.name!r} as a step, which keeps states of sequences; a step has no sequence: let clients "
            f"call {model.name!r} directly, or serve it without --state and sequence_batching"
        )
    for name, axis in model.signature.batch_axes.items():
        raise StartError(
            f"model {user!r} has {model.name!r} as a step, whose tensor {name!r} has its rows on axis {axis}; steps exchange "
            f"tensors with the rows on axis 0: serve {model.name!r} with batching_rewrite = false in its table [models.{model.name}]"
        )


def _settings_over(models: Sequence[Model], max_batch_size: int, config: ServerConfig) -> BatcherSettings:
    """Return the settings that callers of a pipeline see that has no batcher of its own."""
    # A step whose model has fewer classes takes those that it does not have as its default.
    finest = max(
        (model.batcher.settings for model in models), key=lambda settings: len(settings.priority_weights)
    )
    return BatcherSettings(
        max_batch_size,
        priority_weights=finest.priority_weights,
        strict_priorities=finest.strict_priorities,
        default_priority=finest.default_priority,
        max_queue_size=config.max_queue_size,
        max_queue_bytes=config.max_queue_bytes,
    )


def _listed(plan: Plan) -> str:
    return ", ".join(stage.name for stage in plan.stages)


def _weakest(verdicts: Sequence[str]) -> str:
    return next((one for one in _VERDICTS if one in verdicts), "proved")


def _place_step(
    source: ModelSource,
    declared: PipelineModel,
    step: Step,
    context: LoadContext,
    ragged: Mapping[str, RaggedInput],
) -> StepBinding:
    """Load a step of a pipeline. `ragged` has the tensors whose rows differ in length, as functions before it give them."""
    if isinstance(step.model, str):
        try:
            model = context.registry.find(step.model)
        except ServerError as error:
            raise StartError(f"pipeline {declared.name!r}, step {step.model!r}: {error}") from None
        if model.streams:
            raise StartError(
                f"pipeline {declared.name!r}, step {step.model!r}: that model answers in streams, which a step cannot do"
            )
        _check_fits_a_step(declared.name, model)
        used = ModelReference(step.model, "", replace(model.signature, optional=()), model.batched)
        return place(step.model, model.signature, step.inputs, step.outputs, used=used)
    tensors = {tensor: tensor for tensor in ragged if tensor not in step.inputs} | dict(step.inputs)
    of_step = {own: ragged[tensor] for own, tensor in tensors.items() if tensor in ragged}
    loaded = _load_step(
        replace(source, name=step.model.name, declaration=step.model, config=None), context, of_step
    )
    return place(step.model.name, loaded.signature, step.inputs, step.outputs, loaded)


def _ragged_outputs(step: Step, placed: StepBinding) -> Mapping[str, RaggedInput]:
    """Return the tensors of a step whose rows differ in length, and how they are padded by default."""
    if not isinstance(step.model, FunctionModel) or step.model.row_padding is None:
        return {}
    padding = step.model.row_padding()
    return {
        placed.outputs[name]: RaggedInput(padding.lengths, value)
        for name, value in padding.values.items()
        if name in placed.outputs
    }


def _load_step(
    source: ModelSource, context: LoadContext, ragged: Mapping[str, RaggedInput] | None = None
) -> LoadedStep:
    declared, config = source.declaration, context.config.for_model(source.name)
    if isinstance(declared, FunctionModel):
        function, copy = fetched_function(declared, config)
        return load_function_step(function, replace(source, keep_alive=copy), config, context.watchdog)
    if isinstance(declared, OnnxModel):
        source, config = declared_onnx(source, declared, config)
    device = context.devices.get(config.device, "cpu")
    # Steps of a pipeline exchange tensors with the rows on axis 0.
    moves_axes = ragged is None
    return load_onnx_step(
        source,
        config,
        device,
        context.watchdog,
        ragged or {},
        moves_axes=moves_axes,
        new_budget=context.new_budget,
    )


def declared_onnx(
    source: ModelSource, declared: OnnxModel, config: ServerConfig
) -> tuple[ModelSource, ServerConfig]:
    """Return the source and the options of an ONNX file that a Python file declares."""
    if declared.address:
        fetched = fetch_declared(declared, config)
        source = replace(source, path=fetched.path, keep_alive=fetched.tree)
    else:
        source = replace(source, path=source.path.parent / declared.path)
    source = with_head(source, declared, config)
    given = None
    if declared.max_batch_size is not None:
        given = ModelConfig(name=source.name, max_batch_size=declared.max_batch_size)
    if declared.pad_lengths is not None:
        axis, lengths = declared.pad_lengths
        values = tuple((name, str(value)) for name, value in declared.pad_values.items())
        config = replace(config, pad_lengths=PadLengths(axis, lengths), pad_values=values)
    return replace(source, declaration=None, config=given), config


def _pipeline_config(source: ModelSource, plan: Plan, most: int, context: LoadContext) -> ModelConfig:
    """Return the configuration of a pipeline, which describes its steps as an ensemble's."""
    decision = BatchingDecision(most, False, "")
    config = complete_config(
        ModelConfig(name=source.name),
        source,
        plan.signature,
        decision,
        (),
        context.config.for_model(source.name),
    )
    config.platform, config.backend = ENSEMBLE_PLATFORM, ""
    for placed in (step for stage in plan.stages for step in stage.steps):
        step = config.ensemble_scheduling.step.add(model_name=placed.name, model_version=-1)
        step.input_map.update(placed.inputs)
        step.output_map.update(placed.outputs)
    return config


def _model(
    source: ModelSource,
    plan: Plan,
    context: LoadContext,
    config: ModelConfig,
    verdict: str,
    batching: str,
    settings: BatcherSettings | None = None,
) -> Model:
    """Build a planned model. `settings` are those of a pipeline that has no batcher of its own."""
    options = context.config.for_model(source.name)
    # Before the batcher is made, whose threads would outlive a failure.
    labels: Mapping[str, Sequence[str]] = read_labels(source.config, source.directory)
    health = InstanceHealth(
        source.name, source.version, instance_counts(plan), context.on_health_change, context.on_device_lost
    )
    built = build(source.name, plan, context, health, settings)
    placed = [step for stage in plan.stages for step in stage.steps]
    only = placed[0].step if len(placed) == 1 and placed[0].has_own_names else None
    own = [step.step for stage in plan.stages for step in stage.steps[:1] if step.step is not None]
    used = tuple(step.used for step in placed if step.used is not None)
    return Model(
        name=source.name,
        version=source.version,
        signature=plan.signature,
        max_batch_size=built.batcher.settings.max_batch_size,
        batching=batching,
        batcher=built.batcher,
        slo=options.slo or math.inf,
        padding=built.padding,
        config=config,
        labels=StepLabels(labels, plan, context.registry) if used else labels,
        devices=tuple(device for step in own for device in step.settings.devices),
        health=health,
        exemplars=Exemplars() if options.metrics_port is not None else None,
        # Of several steps, it is unknown what each does with empty axes.
        empty_axes=only.empty_axes if only is not None else EmptyAxes(),
        batching_verdict=verdict,
        steps=built.steps
        if len(built.steps) > 1 or used or isinstance(source.declaration, FunctionModel)
        else (),
        uses=used,
        release=built.release,
        streams=any(step.streams for step in own),
        cache=cache_of(source, plan, built.batcher, options),
        task=source.declaration.task if isinstance(source.declaration, PipelineModel) else None,
    )


def _warn_about_unreachable_batches(name: str, step: LoadedStep, config: ServerConfig) -> None:
    """Warn about server limits that keep batches from being full. The batcher warns about its own limits."""
    max_batch_size, slo = step.settings.max_batch_size, config.slo or math.inf
    run_seconds, signature = step.run_seconds, step.signature
    if any(seconds >= slo for seconds in run_seconds.values()):
        _log.warning(
            "model %s: a batch of %d rows took %.1f ms at load, and --slo-ms is %g: batches will have fewer rows",
            name,
            max(run_seconds),
            run_seconds[max(run_seconds)] * 1e3,
            slo * 1e3,
        )
    if not varies(signature) and max_batch_size:
        row = sum(
            math.prod(dim for dim in spec.dims[1:] if isinstance(dim, int)) * spec.datatype.size
            for spec in signature.inputs
        )
        if row * max_batch_size > config.max_queue_bytes:
            _log.warning(
                "model %s: a row has %d bytes, so a batch of %d rows never fits --max-queue-bytes, which is %d: raise it",
                name,
                row,
                max_batch_size,
                config.max_queue_bytes,
            )
