"""Loading of an ONNX model: preparation, sessions, padding, warm-up."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from tensorferry.batcher import Padding, StagedModel
from tensorferry.server.config.server_config import ModelSource, ServerConfig
from tensorferry.server.errors import StartError
from tensorferry.server.model_checks.empty_axes_probe import EmptyAxesProbe, ProbedModel
from tensorferry.server.onnx_models.padding_check import decide_padding, declared_padding
from tensorferry.server.onnx_models.preparation import PreparedModel, prepare_model
from tensorferry.server.onnx_models.row_padding import RaggedInput, with_default_padding
from tensorferry.server.onnx_models.session_factory import SessionFactory, WarmupPlan
from tensorferry.server.onnx_models.warmup_samples import warmup_samples
from tensorferry.server.recovery.instance_health import InstanceHealth
from tensorferry.server.recovery.recovering_instance import RecoveringInstance, RecoveringStagedModel
from tensorferry.server.recovery.watchdog import RunLimits, Watchdog
from tensorferry.server.runtime.fp16 import accuracy_inputs, check_accuracy, model_file
from tensorferry.server.runtime.host_memory import GrowthCheck
from tensorferry.server.runtime.onnx_file import has_steady_run_time
from tensorferry.server.runtime.op_libraries import replacing_library
from tensorferry.server.runtime.ort_options import Fp16
from tensorferry.server.runtime.sampling import Array, random_inputs, varies, working_size
from tensorferry.server.runtime.session import Session
from tensorferry.server.steps.loaded_step import LoadedStep, StepInstance, WarmupTime
from tensorferry.server.telemetry.load_progress import set_load_stage

_log = logging.getLogger("tensorferry.server")

# Rows of a random input that is run in both FP16 and FP32.
_FP16_CHECK_ROWS = 4

_NO_RAGGED_INPUTS: Mapping[str, RaggedInput] = MappingProxyType({})

_Run = Callable[[Mapping[str, Array]], dict[str, Array]]


def load_onnx_step(
    source: ModelSource,
    config: ServerConfig,
    device: str,
    watchdog: Watchdog | None,
    ragged: Mapping[str, RaggedInput] = _NO_RAGGED_INPUTS,
) -> LoadedStep:
    """Load an ONNX model, checked and warmed up. StartError names the file and the reason.

    `ragged` has inputs that a function of the same pipeline makes, with rows of different lengths.
    """
    started = time.monotonic()
    with ExitStack() as scratch:
        prepared = prepare_model(source, config, device, scratch)
        config = with_default_padding(config, source.name, prepared.io_mapping.signature, ragged)
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
    rebuild = partial(loaded.factory.rebuild, runs=any(loaded.slowest))
    limits = RunLimits(watchdog, config.run_timeout, load_seconds)
    sessions = dict(enumerate(loaded.sessions))

    def make_instance(number: int, health: InstanceHealth, health_index: int) -> StepInstance:
        # Removed, because an instance whose device fails must be able to free its session.
        session = sessions.pop(number)
        instance = RecoveringInstance(session, partial(rebuild, session.device), health, health_index, limits)
        staged: StagedModel | None = None
        if instance.staged and not io_mapping.inputs and not io_mapping.outputs:
            # In stages only if clients' tensors need no reshape.
            staged = RecoveringStagedModel(instance)
        return StepInstance(io_mapping.runner(instance.run), instance.on_hang, staged)

    return LoadedStep(
        name=source.name,
        signature=io_mapping.signature,
        settings=settings,
        config=prepared.config,
        decision=prepared.batching,
        batching=loaded.batching,
        make_instance=make_instance,
        run_seconds=loaded.slowest[-1],
        warmup=tuple(_warmup_times(loaded, prepared)),
        padding=loaded.padding,
        empty_axes=empty_axes,
        steady="cpu" in settings.devices
        and replacing_library(settings.ort_options.op_libraries) is None
        and has_steady_run_time(source.path),
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
    with ExitStack() as scratch:
        file = model_file(prepared.file.source, settings, scratch)
        try:
            reference = file.session("cpu", settings)
        except StartError:
            # Some operators exist only on GPUs.
            if device == "cpu":
                raise
            reference = file.session(device, settings)
    in_fp32 = prepared.io_mapping.runner(reference.run)
    signature, size = prepared.io_mapping.signature, prepared.working_size
    if size is None:
        # A model that runs only in FP32 is reported by the check.
        size, _ = working_size(signature, in_fp32)
    rows = min(_FP16_CHECK_ROWS, max(1, prepared.settings.max_batch_size))
    inputs = accuracy_inputs(signature, rows, size, sizes, samples)
    check_accuracy(name, signature, run, in_fp32, inputs, fp16.tolerance)


def _warmup_times(loaded: _LoadedSessions, prepared: PreparedModel) -> Iterator[WarmupTime]:
    """Yield the run times that the warm-up measured on the first instance."""
    signature, size = prepared.io_mapping.signature, prepared.working_size
    first = loaded.run_seconds[0]
    if loaded.padding is not None and size is not None:
        for sizes, run in zip(loaded.factory.warmup.padded_sizes, first, strict=True):
            inputs = random_inputs(signature, 1, size, sizes=sizes)
            key = tuple(inputs[spec.name].shape[1:] for spec in signature.inputs)
            for rows, seconds in run.items():
                yield WarmupTime(rows, seconds, key)
    elif not varies(signature):
        for rows, seconds in first[-1].items():
            yield WarmupTime(rows, seconds)


def _device_counts(devices: tuple[str, ...]) -> str:
    return ", ".join(
        device if count == 1 else f"{count} × {device}" for device, count in Counter(devices).items()
    )
