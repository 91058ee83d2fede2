"""Loading of a model: its steps, their instances, the batcher, and the registry's record."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tensorferry.batcher import (
    Batcher,
    BatchStartCallback,
    InstanceHealthCallback,
    ModelFunction,
    ResponseBurstHook,
    RunTimedOut,
)
from tensorferry.server.config.limits import client_policy
from tensorferry.server.config.server_config import ModelSource, ServerConfig
from tensorferry.server.model_config.settings import ModelSettings
from tensorferry.server.models.labels import read_labels
from tensorferry.server.models.onnx_step import load_onnx_step
from tensorferry.server.models.registry import Model
from tensorferry.server.python_models.loading import load_function_step
from tensorferry.server.recovery.instance_health import InstanceEvent, InstanceHealth
from tensorferry.server.recovery.watchdog import Watchdog
from tensorferry.server.runtime.sampling import varies
from tensorferry.server.steps.loaded_step import LoadedStep, StepInstance
from tensorferry.server.steps.stage_function import CallsOfBatch, StageFunction, StageStep, no_calls
from tensorferry.server.telemetry.exemplars import Exemplars
from tensorferry.server.telemetry.load_progress import LoadProgress
from tensorferry.serving import FunctionModel

_log = logging.getLogger("tensorferry.server")


@dataclass(frozen=True, slots=True)
class LoadContext:
    """What the models of a server have in common.

    `devices` has the device that was chosen for each value of --device; the CPU for others. Without a `watchdog`, hanging runs are not detected. `changed` and `lost`
    are as in `InstanceHealth`, `response_hook` and `batch_started` as in `Batcher`. `calls` makes what functions call other
    models through.
    """

    config: ServerConfig
    devices: Mapping[str, str] = field(default_factory=dict)
    response_hook: ResponseBurstHook | None = None
    watchdog: Watchdog | None = None
    changed: Callable[[InstanceHealth], None] = lambda health: None
    lost: Callable[[str], None] = lambda reason: None
    batch_started: BatchStartCallback | None = None
    calls: CallsOfBatch = no_calls


def load_model(source: ModelSource, context: LoadContext) -> Model:
    """Load a model, checked, warmed up and ready for requests. StartError names the file and the reason."""
    with LoadProgress(f"model {source.name} version {source.version}"):
        step = _load_step(source, context)
    settings, config = step.settings, context.config.for_model(source.name)
    health = InstanceHealth(source.name, source.version, len(settings.devices), context.changed, context.lost)
    instances = [step.make_instance(number, health, number) for number in range(len(settings.devices))]
    functions = [_function(step, instance, source.name, context) for instance in instances]
    batcher = make_batcher(
        source.name, settings, functions, context, _health_callback(health), steady=step.steady
    )
    for index, instance in enumerate(instances):
        instance.on_hang(_hung_run_callback(weakref.ref(batcher), index))
    for rows, seconds, key in step.warmup:
        batcher.add_warmup_sample(rows, seconds, key)
    _warn_about_unreachable_batches(source.name, step, config)
    return Model(
        name=source.name,
        version=source.version,
        signature=step.signature,
        max_batch_size=settings.max_batch_size,
        batching=step.batching,
        batcher=batcher,
        slo=config.slo or math.inf,
        padding=step.padding,
        config=step.config,
        labels=read_labels(source.config, source.directory),
        devices=settings.devices,
        health=health,
        exemplars=Exemplars() if config.metrics_port is not None else None,
        empty_axes=step.empty_axes,
        batching_verdict=step.decision.verdict,
        release=_release(instances),
    )


def _load_step(source: ModelSource, context: LoadContext) -> LoadedStep:
    declared, config = source.declaration, context.config.for_model(source.name)
    if isinstance(declared, FunctionModel):
        return load_function_step(declared, source, config, context.watchdog)
    return load_onnx_step(source, config, context.devices.get(config.device, "cpu"), context.watchdog)


def _function(step: LoadedStep, instance: StepInstance, model: str, context: LoadContext) -> ModelFunction:
    """Return what the batcher runs. A Python function is told the requests of its batch, for calls of other models."""
    if step.python:
        return StageFunction(model, [StageStep(step.name, instance.run)], None, context.calls)
    return instance.run if instance.staged is None else instance.staged


def _release(instances: list[StepInstance]) -> Callable[[], None]:
    def release() -> None:
        for instance in instances:
            instance.close()

    return release


def make_batcher(
    name: str,
    settings: ModelSettings,
    functions: Sequence[ModelFunction],
    context: LoadContext,
    health: InstanceHealthCallback,
    *,
    steady: bool = False,
) -> Batcher:
    """Return the batcher of a model, or of a stage of one. `steady` is as in `Batcher`."""
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
        clients=client_policy(config),
        name=name,
        health=health,
        batch_started=context.batch_started,
    )


def _health_callback(health: InstanceHealth) -> InstanceHealthCallback:
    """Return the batcher's callback that records the end and restart of an instance's worker in the model's health."""

    def update(instance: int, reason: str | None, unrecoverable: bool) -> None:
        if reason is None:
            health.mark_up(instance)
        else:
            health.record(InstanceEvent.WORKER_DIED)
            health.mark_down(instance, reason, unrecoverable=unrecoverable)

    return update


def _hung_run_callback(batcher: weakref.ref[Batcher], instance: int) -> Callable[[RunTimedOut], None]:
    """Return a callback that takes a hung run from the batcher.

    The reference is weak, because the batcher refers to the instance, and an unloaded model must be freed at once.
    """

    def give_up(error: RunTimedOut) -> None:
        if (found := batcher()) is not None:
            found.abort_hung_run(instance, error)

    return give_up


def _warn_about_unreachable_batches(name: str, step: LoadedStep, config: ServerConfig) -> None:
    """Warn about server limits that keep batches from being full. The batcher warns about its own limits."""
    max_batch_size, slo = step.settings.max_batch_size, config.slo or math.inf
    run_seconds, signature = step.run_seconds, step.signature
    in_time = [rows for rows, seconds in run_seconds.items() if seconds < slo]
    if run_seconds and len(in_time) < len(run_seconds):
        _log.warning(
            "model %s: a batch of %d rows took %.1f ms in warm-up, and --slo-ms is %g: batches will have at most %d rows",
            name,
            max(run_seconds),
            run_seconds[max(run_seconds)] * 1e3,
            slo * 1e3,
            max(in_time, default=0),
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
