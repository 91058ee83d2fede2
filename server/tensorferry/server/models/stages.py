"""Stages of a loaded model: the batcher of each, and the pipeline that connects several."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tensorferry.batcher import (
    Batcher,
    BatcherSettings,
    InstanceHealthCallback,
    ModelFunction,
    Pipeline,
    RunTimedOut,
    Stage,
    StageModel,
    Tensor,
)
from tensorferry.server.config.limits import client_policy
from tensorferry.server.errors import NotReadyError
from tensorferry.server.model_config.settings import ModelSettings
from tensorferry.server.models.load_context import LoadContext
from tensorferry.server.models.registry import ModelStep
from tensorferry.server.recovery.instance_health import InstanceEvent, InstanceHealth
from tensorferry.server.signature import Signature
from tensorferry.server.steps.loaded_step import LoadedStep, StepInstance, WarmupTime
from tensorferry.server.steps.named_model import UsedModel, stage_model
from tensorferry.server.steps.planning import Plan, PlannedStage
from tensorferry.server.steps.stage_function import StageFunction, StageStep, StepTimes


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """What runs a model's requests. `release` ends what its instances started, after the batcher is closed."""

    batcher: Batcher | Pipeline
    steps: tuple[ModelStep, ...]
    release: Callable[[], None]


def instance_counts(plan: Plan) -> list[int]:
    """Return the number of instances of each stage that has a batcher of its own."""
    return [
        len(stage.steps[0].step.settings.devices) for stage in plan.stages if stage.steps[0].step is not None
    ]


def build(
    name: str,
    plan: Plan,
    context: LoadContext,
    health: InstanceHealth,
    settings: BatcherSettings | None = None,
) -> BuiltModel:
    """Make the instances and batchers of a planned model. `health` counts the instances of all stages.

    `settings` are those of a pipeline that has no batcher of its own.
    """
    instances: list[StepInstance] = []
    stages: list[Stage] = []
    steps: list[ModelStep] = []
    batchers: list[Batcher] = []
    first = 0
    whole = len(plan.stages) == 1 and plan.stages[0].steps[0].step is not None
    for planned in plan.stages:
        if (used := planned.steps[0].used) is not None:
            stages.append(_stage_of_model(planned, used, context))
            steps.append(_described(planned, 0, ()))
            continue
        batcher, made, times = _build_stage(name, planned, first, context, health, whole=whole)
        first += len(made) // len(planned.steps)
        instances += made
        batchers.append(batcher)
        steps += [_described(planned, index, of_step) for index, of_step in enumerate(times)]
        if not whole:
            stages.append(_stage(planned, batcher))
    release = _release(instances)
    if whole:
        return BuiltModel(batchers[0], tuple(steps), release)
    pipeline = Pipeline(
        name,
        stages,
        inputs=[spec.name for spec in plan.signature.inputs],
        outputs=[spec.name for spec in plan.signature.outputs],
        settings=settings,
        clients=client_policy(context.config.for_model(name)),
    )
    return BuiltModel(pipeline, tuple(steps), release)


def make_batcher(
    name: str,
    settings: ModelSettings,
    functions: Sequence[ModelFunction],
    context: LoadContext,
    health: InstanceHealthCallback,
    *,
    steady: bool = False,
    whole: bool = True,
) -> Batcher:
    """Return the batcher of a model, or of a stage if not `whole`. `steady` is as in `Batcher`."""
    config = context.config.for_model(name)
    return Batcher(
        functions,
        settings.max_batch_size,
        settings.max_queue_delay,
        preferred_batch_sizes=settings.preferred_batch_sizes if settings.merges else (),
        priority_weights=settings.priority_weights,
        default_priority=settings.default_priority,
        strict_priorities=settings.strict_priorities,
        policies=settings.policies,
        merge=settings.merges or not settings.max_batch_size,
        max_queue_size=config.max_queue_size,
        max_queue_bytes=config.max_queue_bytes,
        # The host is free while a GPU computes. On the CPU, preparing the next batch would slow the current one.
        pipelined="cpu" not in settings.devices,
        steady=steady,
        response_hook=context.response_hook,
        # A pipeline bounds its clients itself.
        clients=client_policy(config) if whole else None,
        name=name,
        health=health,
        batch_started=context.batch_started,
    )


def _build_stage(
    model: str,
    planned: PlannedStage,
    first: int,
    context: LoadContext,
    health: InstanceHealth,
    *,
    whole: bool,
) -> tuple[Batcher, list[StepInstance], list[list[StepTimes]]]:
    """Return the batcher of a stage, its instances, and the times of each step by instance."""
    loaded = [placed.step for placed in planned.steps if placed.step is not None]
    settings = loaded[0].settings
    count = len(settings.devices)
    times = [[StepTimes() for _ in range(count)] for _ in loaded]
    by_number = [
        [step.make_instance(number, health, first + number) for step in loaded] for number in range(count)
    ]
    functions = [
        _function(model, planned, made, [of_step[number] for of_step in times], context, whole=whole)
        for number, made in enumerate(by_number)
    ]
    batcher = make_batcher(
        model if whole else f"{model}/{planned.name}",
        settings,
        functions,
        context,
        _health_callback(health, first),
        steady=all(step.steady for step in loaded),
        whole=whole,
    )
    for number, made in enumerate(by_number):
        for instance in made:
            instance.on_hang(_hung_run_callback(weakref.ref(batcher), number))
    for rows, seconds, key in _warmup(loaded):
        batcher.add_warmup_sample(rows, seconds, key)
    return batcher, [instance for made in by_number for instance in made], times


def _function(
    model: str,
    planned: PlannedStage,
    instances: Sequence[StepInstance],
    times: Sequence[StepTimes],
    context: LoadContext,
    *,
    whole: bool,
) -> ModelFunction:
    """Return what the batcher runs."""
    python = any(placed.step is not None and placed.step.python for placed in planned.steps)
    if len(instances) == 1 and not python:
        # A session by itself needs nothing between it and the batcher.
        (only,) = instances
        return only.run if only.staged is None else only.staged
    if len(instances) == 1:
        placed = planned.steps[0]
        return StageFunction(
            model, [StageStep(placed.name, instances[0].run, True, times=times[0])], None, context.calls
        )
    steps = []
    kept = set(planned.outputs)
    for index, (placed, instance) in enumerate(zip(planned.steps, instances, strict=True)):
        read_later = {tensor for later in planned.steps[index + 1 :] for tensor in later.inputs.values()}
        here = [*placed.inputs.values(), *placed.outputs.values()]
        drops = tuple(
            dict.fromkeys(tensor for tensor in here if tensor not in read_later and tensor not in kept)
        )
        same = all(own == tensor for own, tensor in placed.outputs.items())
        steps.append(
            StageStep(
                placed.name,
                instance.run,
                python=placed.step is not None and placed.step.python,
                inputs=placed.inputs,
                outputs=None if same else placed.outputs,
                drops=drops,
                times=times[index],
            )
        )
    return StageFunction(model, steps, planned.outputs, context.calls)


def _stage(planned: PlannedStage, batcher: Batcher) -> Stage:
    """Return the stage of a pipeline. A stage of one step has the step's own names."""
    placed = planned.steps[0]
    inputs: Mapping[str, str] = {tensor: tensor for tensor in planned.inputs}
    outputs: Mapping[str, str] = {tensor: tensor for tensor in planned.outputs}
    shared = planned.shared
    if len(planned.steps) == 1:
        inputs = placed.inputs
        outputs = {own: tensor for own, tensor in placed.outputs.items() if tensor in planned.outputs}
        shared = frozenset(own for own, tensor in inputs.items() if tensor in shared)
    padding = placed.step.padding if placed.step is not None else None
    return Stage(
        planned.name,
        batcher,
        inputs,
        outputs,
        padding=padding,
        shared=shared,
        key=None if shared else _shapes_key,
    )


def _stage_of_model(planned: PlannedStage, used: UsedModel, context: LoadContext) -> Stage:
    """Return the stage that another model of the server runs, looked up for each request."""
    placed, given = planned.steps[0], used.signature
    optional = [spec for spec in given.inputs if spec.optional]
    # The signature that was found to fit last.
    fits: Signature | None = None

    def look_up() -> StageModel:
        nonlocal fits
        model = context.step_model(used.name, used.version)
        if model.signature is not fits:
            if reason := used.misfit(model.signature, batched=model.batched):
                raise NotReadyError(
                    f"model {used.name!r} was replaced by one that does not fit the steps that name it: {reason}"
                )
            fits = model.signature
        if not optional:
            return model.stage
        # As for requests of clients that give such inputs.
        varies = not all(isinstance(dim, int) for spec in optional for dim in spec.dims)
        return stage_model(
            model.name,
            model.batcher,
            model.padding,
            given,
            model.empty_axes,
            batched=model.batched,
            alone=varies or model.batching_verdict == "tested",
        )

    outputs = {own: tensor for own, tensor in placed.outputs.items() if tensor in planned.outputs}
    return Stage(planned.name, look_up, placed.inputs, outputs)


def _shapes_key(tensors: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Return the key that requests of clients have, too: a model's names and datatypes are always the same."""
    return tuple(shapes)


def _described(planned: PlannedStage, index: int, times: Sequence[StepTimes]) -> ModelStep:
    placed = planned.steps[index]
    kind = "model" if placed.step is None else "python" if placed.step.python else "onnx"
    return ModelStep(placed.name, kind, planned.name, placed.inputs, placed.outputs, tuple(times))


def _warmup(steps: Sequence[LoadedStep]) -> Sequence[WarmupTime]:
    """Return the warm-up times of a stage: sums over its steps, for the sizes that all have run."""
    if len(steps) == 1:
        return steps[0].warmup
    by_rows = [{time.rows: time.seconds for time in step.warmup if time.key is None} for step in steps]
    return [
        WarmupTime(rows, sum(times[rows] for times in by_rows))
        for rows in by_rows[0]
        if all(rows in times for times in by_rows)
    ]


def _release(instances: Sequence[StepInstance]) -> Callable[[], None]:
    def release() -> None:
        for instance in instances:
            instance.close()

    return release


def _health_callback(health: InstanceHealth, first: int) -> InstanceHealthCallback:
    """Return the batcher's callback that records the end and restart of an instance's worker in the model's health.

    `first` is the number of the batcher's first instance in the model's health.
    """

    def update(instance: int, reason: str | None, unrecoverable: bool) -> None:
        if reason is None:
            health.mark_up(first + instance)
        else:
            health.record(InstanceEvent.WORKER_DIED)
            health.mark_down(first + instance, reason, unrecoverable=unrecoverable)

    return update


def _hung_run_callback(batcher: weakref.ref[Batcher], instance: int) -> Callable[[RunTimedOut], None]:
    """Return a callback that takes a hung run from the batcher.

    The reference is weak, because the batcher refers to the instance, and an unloaded model must be freed at once.
    """

    def give_up(error: RunTimedOut) -> None:
        if (found := batcher()) is not None:
            found.abort_hung_run(instance, error)

    return give_up
