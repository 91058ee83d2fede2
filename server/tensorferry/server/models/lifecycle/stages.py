"""Stages of a loaded model: the batcher of each, and the pipeline that connects several."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tensorferry.batcher import (
    Batcher,
    BatcherSettings,
    ClientPolicy,
    InstanceHealthCallback,
    ModelFunction,
    Padding,
    Pipeline,
    ResponseBurstHook,
    RunTimedOut,
    Stage,
    StageModel,
    StatefulBatcher,
    Tensor,
)
from tensorferry.server.config.limits import client_policy
from tensorferry.server.config.server_config import ServerConfig
from tensorferry.server.errors import NotReadyError
from tensorferry.server.models.config_pbtxt.settings import ModelSettings
from tensorferry.server.models.lifecycle.load_context import LoadContext
from tensorferry.server.models.lifecycle.model import ModelStep
from tensorferry.server.python.steps.loaded_step import DeclaredSequences, LoadedStep, StepInstance
from tensorferry.server.python.steps.named_model import ModelReference, stage_model
from tensorferry.server.python.steps.planning import Plan, PlannedStage, StepBinding
from tensorferry.server.python.steps.stage_function import StageFunction, StageStep, StepTimes, no_calls
from tensorferry.server.python.steps.stream_function import StreamFunction
from tensorferry.server.runtime.recovery.instance_health import InstanceEvent, InstanceHealth
from tensorferry.server.signature import Signature


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """What runs a model's requests.

    `padding` is that of clients' requests; each stage of a pipeline has its own. `release` ends what the instances started,
    after the batcher is closed.
    """

    batcher: Batcher | Pipeline
    padding: Padding | None
    steps: tuple[ModelStep, ...]
    release: Callable[[], None]


def instance_counts(plan: Plan) -> list[int]:
    """Return the number of instances of each stage that has a batcher of its own."""
    steps = [planned.steps[0].step for planned in plan.stages]
    return [len(step.settings.devices) for step in steps if step is not None]


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
    policy = client_policy(context.config.for_model(name))
    if len(plan.stages) == 1 and plan.stages[0].steps[0].step is not None:
        (planned,) = plan.stages
        stage = _StageBuilder(name, planned, context, health, 0, whole=True)
        batcher = stage.batcher(name, context.response_hook, policy)
        return BuiltModel(batcher, stage.padding, stage.described(), stage.close)
    # The pipeline bounds its clients. Its stages let them share.
    share = replace(ClientPolicy(), fair=True, weights=policy.weights) if policy and policy.fair else None
    stages: list[Stage] = []
    steps: list[ModelStep] = []
    started = ExitStack()
    first = 0
    for planned in plan.stages:
        if (used := planned.steps[0].used) is not None:
            stages.append(_stage_of_model(planned, used, context))
            steps.append(_described(planned.steps[0], planned))
            continue
        stage = _StageBuilder(name, planned, context, health, first, whole=False)
        first += stage.count
        # Only the last stage's completions are responses.
        hook = context.response_hook if planned is plan.stages[-1] else None
        stages.append(stage.stage(stage.batcher(f"{name}/{planned.name}", hook, share)))
        steps += stage.described()
        started.callback(stage.close)
    pipeline = Pipeline(
        name,
        stages,
        inputs=[spec.name for spec in plan.signature.inputs],
        outputs=[spec.name for spec in plan.signature.outputs],
        settings=settings,
        clients=policy,
    )
    return BuiltModel(pipeline, None, tuple(steps), started.close)


def make_batcher(
    name: str,
    settings: ModelSettings,
    functions: Sequence[ModelFunction],
    config: ServerConfig,
    sequences: DeclaredSequences | None = None,
    **callbacks: Any,
) -> Batcher:
    """Return the batcher of a model, or of a stage of one.

    `config` has the options of the model, `sequences` its states. `callbacks` are further arguments of `Batcher`.
    """
    make: Callable[..., Batcher] = Batcher
    if sequences is not None:
        make = partial(
            StatefulBatcher,
            states=sequences.states,
            controls=sequences.controls,
            limits=sequences.limits,
        )
    return make(
        functions,
        max_batch_size=settings.max_batch_size,
        max_queue_delay=settings.max_queue_delay,
        preferred_batch_sizes=settings.preferred_batch_sizes if settings.merges else (),
        priority_weights=settings.priority_weights,
        default_priority=settings.default_priority,
        strict_priorities=settings.strict_priorities,
        policies=settings.policies,
        merge=settings.merges or not settings.max_batch_size,
        adaptive=config.batch_rows == "pays",
        max_queue_size=config.max_queue_size,
        max_queue_bytes=config.max_queue_bytes,
        # The host is free while a GPU computes. On the CPU, preparing the next batch would slow the current one.
        pipelined="cpu" not in settings.devices,
        name=name,
        **callbacks,
    )


class _StageBuilder:
    """Makes the instances of a stage's steps, what its batcher runs, and its batcher.

    `first` is the number of its first instance in the model's health.
    The tensors of a stage have the pipeline's names. Only those of a stage of one step that is not the `whole` model have
    the step's own names, because the pipeline renames them.
    """

    def __init__(
        self,
        model: str,
        planned: PlannedStage,
        context: LoadContext,
        health: InstanceHealth,
        first: int,
        *,
        whole: bool,
    ) -> None:
        self._model = model
        self._planned = planned
        self._context = context
        self._health = health
        self._loaded = [placed.step for placed in planned.steps if placed.step is not None]
        self._own_names = len(planned.steps) == 1 and (not whole or planned.steps[0].has_own_names)
        self._steady = all(step.steady for step in self._loaded)
        self._settings = self._loaded[0].settings
        self.count = len(self._settings.devices)
        self._first = first
        self._times = [[StepTimes() for _ in range(self.count)] for _ in self._loaded]
        # By instance, then by step.
        self._instances = [
            [step.make_instance(number, health, first + number) for step in self._loaded]
            for number in range(self.count)
        ]

    @property
    def padding(self) -> Padding | None:
        """How requests are padded, by the stage's names."""
        padding, placed = self._loaded[0].padding, self._planned.steps[0]
        if padding is None or self._own_names or not isinstance(padding.inputs, Mapping):
            return padding
        outputs = padding.outputs if isinstance(padding.outputs, Mapping) else {}
        return replace(
            padding,
            inputs={placed.inputs[name]: pad for name, pad in padding.inputs.items()},
            outputs={
                tensor: axis
                for name, axis in outputs.items()
                if (tensor := placed.outputs[name]) in self._planned.outputs
            },
        )

    def batcher(self, name: str, hook: ResponseBurstHook | None, clients: ClientPolicy | None) -> Batcher:
        """Return a new batcher of the stage, which knows the times of the runs at load."""
        batcher = make_batcher(
            name,
            self._settings,
            [self._function(number) for number in range(self.count)],
            self._context.config.for_model(self._model),
            self._loaded[0].sequences,
            steady=self._steady,
            # They depend on how fast clients read.
            learn_times=not self._loaded[0].streams,
            response_hook=hook,
            clients=clients,
            health=_health_callback(self._health, self._first),
            batch_started=self._context.batch_started,
        )
        for number, made in enumerate(self._instances):
            for instance in made:
                instance.on_hang(_hung_run_callback(weakref.ref(batcher), number))
        for rows, seconds in sorted(_warmup(self._loaded).items()):
            batcher.add_warmup_sample(rows, seconds)
        return batcher

    def stage(self, batcher: Batcher) -> Stage:
        """Return the stage of a pipeline."""
        planned = self._planned
        placed = planned.steps[0]
        inputs: Mapping[str, str] = {tensor: tensor for tensor in planned.inputs}
        outputs: Mapping[str, str] = {tensor: tensor for tensor in planned.outputs}
        shared = planned.shared
        if self._own_names:
            inputs = placed.inputs
            outputs = {own: tensor for own, tensor in placed.outputs.items() if tensor in planned.outputs}
            shared = frozenset(own for own, tensor in inputs.items() if tensor in shared)
        key = None if shared else _shapes_key
        return Stage(
            planned.name,
            batcher,
            inputs,
            outputs,
            padding=self.padding,
            shared=shared,
            key=key,
            divides=not all(step.python for step in self._loaded),
        )

    def described(self) -> tuple[ModelStep, ...]:
        """Return the steps, for metrics and the status page."""
        return tuple(
            replace(
                _described(placed, self._planned),
                times=tuple(times),
                processes=tuple(one.process for one in instances if one.process is not None),
            )
            for placed, times, instances in zip(
                self._planned.steps, self._times, zip(*self._instances, strict=True), strict=True
            )
        )

    def close(self) -> None:
        """End what the instances started."""
        for made in self._instances:
            for instance in made:
                instance.close()

    def _function(self, number: int) -> ModelFunction:
        """Return what the batcher runs on an instance."""
        instances, model = self._instances[number], self._model
        # A steady stage may run on a transport's thread, which must not wait for another model.
        calls = no_calls if self._steady else self._context.calls
        if (answers := instances[0].answers) is not None:
            times = self._times[0][number]
            return StreamFunction(model, answers, times, calls, self._context.watchdog)
        if self._own_names:
            (placed,), (instance,), (step,) = self._planned.steps, instances, self._loaded
            if not step.python:
                # A session by itself needs nothing between it and the batcher.
                return instance.run if instance.staged is None else instance.staged
            alone = StageStep(placed.name, instance.run, python=True, times=self._times[0][number])
            return StageFunction(model, [alone], None, calls)
        steps = [self._stage_step(index, instance, number) for index, instance in enumerate(instances)]
        return StageFunction(model, steps, self._planned.outputs, calls)

    def _stage_step(self, index: int, instance: StepInstance, number: int) -> StageStep:
        planned, placed = self._planned, self._planned.steps[index]
        needed = {tensor for later in planned.steps[index + 1 :] for tensor in later.inputs.values()}
        needed.update(planned.outputs)
        here = dict.fromkeys([*placed.inputs.values(), *placed.outputs.values()])
        return StageStep(
            placed.name,
            instance.run,
            python=self._loaded[index].python,
            inputs=placed.inputs,
            outputs=None if all(own == tensor for own, tensor in placed.outputs.items()) else placed.outputs,
            drops=tuple(tensor for tensor in here if tensor not in needed),
            times=self._times[index][number],
        )


def _stage_of_model(planned: PlannedStage, used: ModelReference, context: LoadContext) -> Stage:
    """Return the stage that another model of the server runs, looked up for each request."""
    placed, given = planned.steps[0], used.signature
    optional = [spec for spec in given.inputs if spec.optional]
    # The signature that was found to fit last.
    fits: Signature | None = None

    def look_up() -> StageModel:
        nonlocal fits
        model = context.registry.step_model(used.name, used.version)
        if model.signature is not fits:
            if reason := model.misfit(used):
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
            divides=model.stage.divides,
        )

    outputs = {own: tensor for own, tensor in placed.outputs.items() if tensor in planned.outputs}
    return Stage(planned.name, look_up, placed.inputs, outputs)


def _shapes_key(tensors: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Return the key that requests of clients have, too: a model's names and datatypes are always the same."""
    return tuple(shapes)


def _described(placed: StepBinding, planned: PlannedStage) -> ModelStep:
    kind = "model" if placed.step is None else "python" if placed.step.python else "onnx"
    return ModelStep(placed.name, kind, planned.name, placed.inputs, placed.outputs)


def _warmup(steps: Sequence[LoadedStep]) -> Mapping[int, float]:
    """Return the seconds of a stage at load, by rows: sums over its steps, for the sizes that all have run."""
    sizes = [rows for rows in steps[0].warmup if all(rows in step.warmup for step in steps)]
    return {rows: sum(step.warmup[rows] for step in steps) for rows in sizes}


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
