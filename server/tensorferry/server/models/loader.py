"""Loading of a model: preparation, sessions, padding, warm-up, batcher."""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from tensorferry.batcher import (
    Batcher,
    BatchStartCallback,
    InstanceHealthCallback,
    Padding,
    ResponseBurstHook,
    RunTimedOut,
)
from tensorferry.server.config.limits import client_policy
from tensorferry.server.config.server_config import ModelSource, ServerConfig
from tensorferry.server.errors import StartError
from tensorferry.server.model_checks.empty_axes_probe import EmptyAxesProbe, ProbedModel
from tensorferry.server.model_config.io_mapping import IoMapping
from tensorferry.server.model_config.settings import ModelSettings
from tensorferry.server.models.labels import read_labels
from tensorferry.server.models.padding_check import decide_padding, declared_padding
from tensorferry.server.models.preparation import PreparedModel, prepare_model
from tensorferry.server.models.registry import Model
from tensorferry.server.models.session_factory import SessionFactory, WarmupPlan
from tensorferry.server.models.warmup_samples import warmup_samples
from tensorferry.server.recovery.instance_health import InstanceEvent, InstanceHealth
from tensorferry.server.recovery.recovering_instance import RecoveringInstance, RecoveringStagedModel
from tensorferry.server.recovery.watchdog import RunLimits, Watchdog
from tensorferry.server.runtime.fp16 import accuracy_inputs, check_accuracy
from tensorferry.server.runtime.host_memory import GrowthCheck
from tensorferry.server.runtime.onnx_file import has_steady_run_time
from tensorferry.server.runtime.ort_options import Fp16
from tensorferry.server.runtime.sampling import Array, random_inputs, varies, working_size
from tensorferry.server.runtime.session import Session
from tensorferry.server.signature import Signature
from tensorferry.server.telemetry.exemplars import Exemplars
from tensorferry.server.telemetry.load_progress import LoadProgress, set_load_stage

_log = logging.getLogger("tensorferry.server")

# Rows of a random input that is run in both FP16 and FP32.
_FP16_CHECK_ROWS = 4

_Run = Callable[[Mapping[str, Array]], dict[str, Array]]


def load_model(
    source: ModelSource,
    config: ServerConfig,
    device: str,
    response_hook: ResponseBurstHook | None = None,
    watchdog: Watchdog | None = None,
    *,
    changed: Callable[[InstanceHealth], None] = lambda health: None,
    lost: Callable[[str], None] = lambda reason: None,
    batch_started: BatchStartCallback | None = None,
) -> Model:
    """Load a model, checked, warmed up and ready for requests. StartError names the file and the reason.

    `config` has the options of this model, as `ServerConfig.for_model` returns them. Without a `watchdog`, hanging runs are not detected. `changed` and `lost` are as in `InstanceHealth`, the
    other callbacks as in `Batcher`.
    """
    started = time.monotonic()
    with ExitStack() as scratch, LoadProgress(f"model {source.name} version {source.version}"):
        prepared = prepare_model(source, config, device, scratch)
        settings, io_mapping = prepared.settings, prepared.io_mapping
        # The probe runs during the warm-up.
        with EmptyAxesProbe(_probed_model(source, prepared)) as probe:
            loaded = _load_sessions(source, config, prepared)
            set_load_stage("checking axes of length zero")
            empty_axes = probe.result()
    load_seconds = time.monotonic() - started
    _log.info(
        "model %s version %s loaded from %s on %s in %.2f s, warmed at batches of %s",
        source.name,
        source.version,
        source.path,
        _device_counts(settings.devices),
        load_seconds,
        ", ".join(map(str, loaded.slowest[-1])) or "no size: it does not run on random input",
    )
    health = InstanceHealth(source.name, source.version, len(settings.devices), changed, lost)
    rebuild = partial(loaded.factory.rebuild, runs=any(loaded.slowest))
    instances = [
        RecoveringInstance(
            session,
            partial(rebuild, session.device),
            health,
            index,
            RunLimits(watchdog, config.run_timeout, load_seconds),
        )
        for index, session in enumerate(loaded.sessions)
    ]
    functions = [_function(io_mapping, one) for one in instances]
    batcher = _batcher(
        source, config, settings, functions, response_hook, _health_callback(health), batch_started
    )
    for index, instance in enumerate(instances):
        instance.on_hang(_hung_run_callback(weakref.ref(batcher), index))
    _add_warmup_times(batcher, loaded, prepared)
    _warn_about_unreachable_batches(source.name, io_mapping.signature, settings, loaded.slowest[-1], config)
    return Model(
        name=source.name,
        version=source.version,
        signature=io_mapping.signature,
        max_batch_size=settings.max_batch_size,
        batching=loaded.batching,
        batcher=batcher,
        slo=config.slo or math.inf,
        padding=loaded.padding,
        config=prepared.config,
        labels=read_labels(source.config, source.directory),
        devices=settings.devices,
        health=health,
        exemplars=Exemplars() if config.metrics_port is not None else None,
        empty_axes=empty_axes,
        batching_verdict=prepared.batching.verdict,
    )


def _probed_model(source: ModelSource, prepared: PreparedModel) -> ProbedModel:
    return ProbedModel(
        name=source.name,
        source=prepared.file.source,
        path=prepared.file.path,
        ort_options=prepared.settings.ort_options,
        io_mapping=prepared.io_mapping,
        max_batch_size=prepared.settings.max_batch_size,
        working_size=prepared.working_size,
    )


class _LoadedSessions(NamedTuple):
    """A model's warm sessions.

    `run_seconds` has, for each session and padded length, the seconds by number of rows; `slowest` has the greatest over
    the sessions. `batching` describes batching and padding to people.
    """

    factory: SessionFactory
    sessions: Sequence[Session]
    run_seconds: Sequence[Sequence[Mapping[int, float]]]
    slowest: Sequence[Mapping[int, float]]
    padding: Padding | None
    batching: str


def _load_sessions(source: ModelSource, config: ServerConfig, prepared: PreparedModel) -> _LoadedSessions:
    settings, signature = prepared.settings, prepared.io_mapping.signature
    samples, warnings = warmup_samples(prepared.config, signature, source.directory)
    for warning in warnings:
        _log.warning("%s", warning)
    declared = declared_padding(prepared, config)
    sessions = [prepared.session]
    # Each instance has its own copy of the weights.
    memory = GrowthCheck()
    for device in settings.devices[1:]:
        if device == "cpu":
            # ONNX Runtime checks the memory of GPUs.
            memory.check(
                f"model {source.name!r}: instance {len(sessions) + 1} of {len(settings.devices)}",
                "lower the count of its instance_group, or --instances",
                steps=len(sessions) - 1,
            )
        set_load_stage(f"making session {len(sessions) + 1} of {len(settings.devices)}")
        sessions.append(prepared.file.session(device, settings.ort_options))
    set_load_stage("checking padding")
    run_first = prepared.io_mapping.runner(prepared.session.run)
    padding = decide_padding(source.name, prepared, run_first, config, declared)
    batching = prepared.batching.description
    padded_sizes: list[Mapping[str, int]] = [{}]
    if padding is not None and config.pad_lengths is not None:
        axis, lengths = config.pad_lengths
        padded_sizes = [{axis: length} for length in lengths]
        batching += f", padded along {axis!r} to {', '.join(map(str, lengths))}"
    if prepared.file.path != source.path and settings.ort_options.fp16 is not None:
        inputs = [sample.inputs for sample in samples]
        _check_fp16(source.name, prepared, run_first, padded_sizes[-1], inputs, settings.ort_options.fp16)
    plan = WarmupPlan(samples, prepared.working_size, padded_sizes, config.max_queue_size)
    factory = SessionFactory(source, prepared.io_mapping, settings, plan)
    set_load_stage("capturing CUDA graphs and warming up")
    captured = [factory.capture(session) for session in sessions]
    if captured[0]:
        _log.info("model %s: CUDA graphs for batches of %s", source.name, ", ".join(map(str, captured[0])))
    run_seconds = [factory.warm_up(session) for session in sessions]
    # Devices may differ, so limits are compared with the slowest one.
    slowest = [_slowest(of_one_length) for of_one_length in zip(*run_seconds, strict=True)]
    return _LoadedSessions(factory, sessions, run_seconds, slowest, padding, batching)


def _batcher(
    source: ModelSource,
    config: ServerConfig,
    settings: ModelSettings,
    functions: Sequence[Callable[[Any], Any]],
    response_hook: ResponseBurstHook | None,
    health: InstanceHealthCallback,
    batch_started: BatchStartCallback | None,
) -> Batcher:
    on_gpus = "cpu" not in settings.devices
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
        pipelined=on_gpus,
        steady=not on_gpus and has_steady_run_time(source.path),
        response_hook=response_hook,
        clients=client_policy(config),
        name=source.name,
        health=health,
        batch_started=batch_started,
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


def _add_warmup_times(batcher: Batcher, loaded: _LoadedSessions, prepared: PreparedModel) -> None:
    """Give the batcher the run times that the warm-up measured on the first instance."""
    signature, size = prepared.io_mapping.signature, prepared.working_size
    first = loaded.run_seconds[0]
    if loaded.padding is not None and size is not None:
        for sizes, run in zip(loaded.factory.warmup.padded_sizes, first, strict=True):
            inputs = random_inputs(signature, 1, size, sizes=sizes)
            key = tuple(inputs[spec.name].shape[1:] for spec in signature.inputs)
            for rows, seconds in run.items():
                batcher.add_warmup_sample(rows, seconds, key)
    elif not varies(signature):
        for rows, seconds in first[-1].items():
            batcher.add_warmup_sample(rows, seconds)


def _hung_run_callback(batcher: weakref.ref[Batcher], instance: int) -> Callable[[RunTimedOut], None]:
    """Return a callback that takes a hung run from the batcher.

    The reference is weak, because the batcher refers to the instance, and an unloaded model must be freed at once.
    """

    def give_up(error: RunTimedOut) -> None:
        if (found := batcher()) is not None:
            found.abort_hung_run(instance, error)

    return give_up


def _slowest(runs: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Return the greatest seconds by number of rows, for those that all instances ran."""
    return {rows: max(run[rows] for run in runs) for rows in runs[0] if all(rows in run for run in runs)}


def _check_fp16(
    name: str,
    prepared: PreparedModel,
    run: _Run,
    sizes: Mapping[str, int],
    samples: Sequence[Mapping[str, Array]],
    fp16: Fp16,
) -> None:
    """Compare the converted model with the original in FP32, which runs on the CPU if possible."""
    settings = replace(prepared.settings.ort_options, fp16=None)
    device = prepared.settings.devices[0]
    try:
        reference = Session(prepared.file.source, "cpu", settings)
    except StartError:
        # Some operators exist only on GPUs.
        if device == "cpu":
            raise
        reference = Session(prepared.file.source, device, settings)
    in_fp32 = prepared.io_mapping.runner(reference.run)
    signature, size = prepared.io_mapping.signature, prepared.working_size
    if size is None:
        # A model that runs only in FP32 is reported by the check.
        size, _ = working_size(signature, in_fp32)
    rows = min(_FP16_CHECK_ROWS, max(1, prepared.settings.max_batch_size))
    inputs = accuracy_inputs(signature, rows, size, sizes, samples)
    check_accuracy(name, signature, run, in_fp32, inputs, fp16.tolerance)


def _function(io_mapping: IoMapping, instance: RecoveringInstance) -> Callable[[Any], Any]:
    """Return what the batcher runs; in stages if clients' tensors need no reshape."""
    if instance.staged and not io_mapping.inputs and not io_mapping.outputs:
        return RecoveringStagedModel(instance)
    return io_mapping.runner(instance.run)


def _device_counts(devices: tuple[str, ...]) -> str:
    return ", ".join(
        device if count == 1 else f"{count} × {device}" for device, count in Counter(devices).items()
    )


def _warn_about_unreachable_batches(
    name: str,
    signature: Signature,
    settings: ModelSettings,
    run_seconds: Mapping[int, float],
    config: ServerConfig,
) -> None:
    """Warn about server limits that keep batches from being full. The batcher warns about its own limits."""
    max_batch_size, slo = settings.max_batch_size, config.slo or math.inf
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
