"""Loads a model: sessions, batching and padding proof, warm-up, batcher."""

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

from tensorferry.batcher import Batcher, Padding, ResponseBurstHook, RunTimedOut
from tensorferry.server.batching_check.decision import batching_policy
from tensorferry.server.config.limits import client_policy
from tensorferry.server.config.server_config import ModelSource, ServerConfig
from tensorferry.server.errors import StartError
from tensorferry.server.model_checks.empty_axes_probe import EmptyAxesProbe, ProbedModel
from tensorferry.server.model_config.io_mapping import IoMapping
from tensorferry.server.model_config.settings import ModelSettings
from tensorferry.server.models.labels import read_labels
from tensorferry.server.models.padding_check import declared_padding, padding_dependence
from tensorferry.server.models.preparation import Prepared, prepare
from tensorferry.server.models.registry import Model
from tensorferry.server.models.session_factory import SessionFactory
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

# In a random input that is run both in FP16 and in FP32.
_ROWS = 4

_Run = Callable[[Mapping[str, Array]], dict[str, Array]]


def load_model(
    source: ModelSource,
    config: ServerConfig,
    device: str,
    together: ResponseBurstHook | None = None,
    watchdog: Watchdog | None = None,
    *,
    changed: Callable[[InstanceHealth], None] = lambda health: None,
    lost: Callable[[str], None] = lambda reason: None,
) -> Model:
    """The model, proved, warm and ready to take requests. StartError names file and reason.

    Without a `watchdog` nothing looks after runs that hang. `changed` and `lost` are as in `InstanceHealth`.
    """
    started = time.monotonic()
    with ExitStack() as scratch, LoadProgress(f"model {source.name} version {source.version}"):
        prepared = prepare(source, config, device, scratch)
        settings, io_mapping = prepared.settings, prepared.io_mapping
        # Beside the warm-up.
        with EmptyAxesProbe(_subject(source, prepared)) as probe:
            loaded = _load(source, config, prepared)
            set_load_stage("checking axes of length zero")
            empty_axes = probe.result()
    took = time.monotonic() - started
    _log.info(
        "model %s version %s loaded from %s on %s in %.2f s, warmed at batches of %s",
        source.name,
        source.version,
        source.path,
        _places(settings.devices),
        took,
        ", ".join(map(str, loaded.runs[-1])) or "no size: it does not run on random input",
    )
    health = InstanceHealth(source.name, source.version, len(settings.devices), changed, lost)
    rebuild = partial(loaded.blueprint.rebuild, runs=any(loaded.runs))
    instances = [
        RecoveringInstance(
            session,
            partial(rebuild, session.device),
            health,
            index,
            RunLimits(watchdog, config.run_timeout, took),
        )
        for index, session in enumerate(loaded.sessions)
    ]
    functions = [_function(io_mapping, one) for one in instances]
    batcher = _batcher(source, config, settings, functions, together, _health_callback(health))
    for index, instance in enumerate(instances):
        instance.give_up = _giving_up(weakref.ref(batcher), index)
    _anchor(batcher, loaded, prepared)
    slo = config.slo or math.inf
    _warn_of_unreachable_batches(
        source.name, io_mapping.signature, settings.max_batch_size, loaded.runs[-1], slo, config
    )
    return Model(
        source.name,
        source.version,
        io_mapping.signature,
        settings.max_batch_size,
        loaded.words,
        batcher,
        slo,
        loaded.padding,
        prepared.config,
        read_labels(source.config, source.directory),
        settings.devices,
        health,
        Exemplars() if config.metrics_port is not None else None,
        empty_axes,
        prepared.batching.verdict,
    )


def _subject(source: ModelSource, prepared: Prepared) -> ProbedModel:
    settings, file = prepared.settings, prepared.file
    return ProbedModel(
        source.name,
        file.source,
        file.path,
        settings.session,
        prepared.io_mapping,
        settings.max_batch_size,
        prepared.size,
    )


class _Loaded(NamedTuple):
    """A model's sessions, warm; `each` has what theirs took, by length the seconds by rows, and `runs` that of the slowest."""

    blueprint: SessionFactory
    sessions: Sequence[Session]
    each: Sequence[Sequence[Mapping[int, float]]]
    runs: Sequence[Mapping[int, float]]
    padding: Padding | None
    words: str


def _load(source: ModelSource, config: ServerConfig, prepared: Prepared) -> _Loaded:
    settings, signature = prepared.settings, prepared.io_mapping.signature
    samples, left_out = warmup_samples(prepared.config, signature, source.directory)
    for warning in left_out:
        _log.warning("%s", warning)
    declared = _declared_padding(prepared, config)
    # Each instance has the model's weights of its own.
    sessions = [prepared.session]
    memory = GrowthCheck()
    for place in settings.devices[1:]:
        if place == "cpu":
            # The memory of GPUs is ONNX Runtime's to check.
            memory.check(
                f"model {source.name!r}: instance {len(sessions) + 1} of {len(settings.devices)}",
                "lower the count of its instance_group",
                steps=len(sessions) - 1,
            )
        set_load_stage(f"making session {len(sessions) + 1} of {len(settings.devices)}")
        sessions.append(prepared.file.session(place, settings.session))
    set_load_stage("checking padding")
    run_first = prepared.io_mapping.runner(prepared.session.run)
    padding = _decide_padding(source.name, prepared, run_first, config, declared)
    words = prepared.batching.description
    ladder: list[Mapping[str, int]] = [{}]
    if padding is not None and config.pad_lengths is not None:
        axis, lengths = config.pad_lengths
        ladder = [{axis: length} for length in lengths]
        words += f", padded along {axis!r} to {', '.join(map(str, lengths))}"
    if prepared.file.path != source.path and settings.session.fp16 is not None:
        given = [one.inputs for one in samples]
        _check_fp16(source.name, prepared, run_first, ladder[-1], given, settings.session.fp16)
    blueprint = SessionFactory(
        source, prepared.io_mapping, settings, prepared.size, samples, ladder, config.max_queue_size
    )
    set_load_stage("capturing CUDA graphs and warming up")
    captured = [blueprint.capture(session) for session in sessions]
    each = [blueprint.warm_up(session) for session in sessions]
    for rungs in captured[:1]:
        if rungs:
            _log.info("model %s: CUDA graphs for batches of %s", source.name, ", ".join(map(str, rungs)))
    # Where devices differ, nothing is promised that only the fastest can keep.
    runs = [_slowest(of_one_length) for of_one_length in zip(*each, strict=True)]
    return _Loaded(blueprint, sessions, each, runs, padding, words)


def _batcher(
    source: ModelSource,
    config: ServerConfig,
    settings: ModelSettings,
    functions: Sequence[Callable[[Any], Any]],
    together: ResponseBurstHook | None,
    health: Callable[[int, str | None, bool], None],
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
        # The host has hands free while a GPU computes; on the CPU both would share the cores.
        pipelined=on_gpus,
        steady=not on_gpus and has_steady_run_time(source.path),
        response_hook=together,
        clients=client_policy(config),
        name=source.name,
        health=health,
    )


def _health_callback(health: InstanceHealth) -> Callable[[int, str | None, bool], None]:
    """What the batcher says of an instance whose worker ended is the model's health, too."""

    def tell(instance: int, reason: str | None, unrecoverable: bool) -> None:
        if reason is None:
            health.mark_up(instance)
        else:
            health.record(InstanceEvent.WORKER_DIED)
            health.mark_down(instance, reason, unrecoverable=unrecoverable)

    return tell


def _anchor(batcher: Batcher, loaded: _Loaded, prepared: Prepared) -> None:
    """Tells the batcher what the warm-up took on the first instance."""
    signature, size = prepared.io_mapping.signature, prepared.size
    first = loaded.each[0]
    if loaded.padding is not None and size is not None:
        for sizes, run in zip(loaded.blueprint.lengths, first, strict=True):
            inputs = random_inputs(signature, 1, size, sizes=sizes)
            key = tuple(inputs[spec.name].shape[1:] for spec in signature.inputs)
            for rows, seconds in run.items():
                batcher.add_warmup_sample(rows, seconds, key)
    elif not varies(signature):
        for rows, seconds in first[-1].items():
            batcher.add_warmup_sample(rows, seconds)


def _giving_up(batcher: weakref.ref[Batcher], instance: int) -> Callable[[RunTimedOut], None]:
    """Weakly: the batcher has the instance already, and an unloaded model must be freed at once."""

    def give_up(error: RunTimedOut) -> None:
        if (found := batcher()) is not None:
            found.abort_hung_run(instance, error)

    return give_up


def _slowest(runs: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """What each number of rows took on the instance that took longest, where all of them ran it."""
    return {rows: max(run[rows] for run in runs) for rows in runs[0] if all(rows in run for run in runs)}


def _check_fp16(
    name: str,
    prepared: Prepared,
    run: _Run,
    sizes: Mapping[str, int],
    given: Sequence[Mapping[str, Array]],
    fp16: Fp16,
) -> None:
    """Compares the model with what its own file computes in FP32, on the CPU if it can."""
    settings = replace(prepared.settings.session, fp16=None)
    device = prepared.settings.devices[0]
    try:
        reference = Session(prepared.file.source, "cpu", settings)
    except StartError:
        # Some operators are there on GPUs alone.
        if device == "cpu":
            raise
        reference = Session(prepared.file.source, device, settings)
    in_fp32 = prepared.io_mapping.runner(reference.run)
    signature, size = prepared.io_mapping.signature, prepared.size
    if size is None:
        # That it runs in FP32 alone would be said by the check.
        size, _ = working_size(signature, in_fp32)
    rows = min(_ROWS, max(1, prepared.settings.max_batch_size))
    inputs = accuracy_inputs(signature, rows, size, sizes, given)
    check_accuracy(name, signature, run, in_fp32, inputs, fp16.tolerance)


def _function(io_mapping: IoMapping, instance: RecoveringInstance) -> Callable[[Any], Any]:
    """What the batcher runs: in steps, where the tensors of the wire are those of the model."""
    if instance.staged and not io_mapping.inputs and not io_mapping.outputs:
        return RecoveringStagedModel(instance)
    return io_mapping.runner(instance.run)


def _places(devices: tuple[str, ...]) -> str:
    return ", ".join(
        place if count == 1 else f"{count} × {place}" for place, count in Counter(devices).items()
    )


def _warn_of_unreachable_batches(
    name: str,
    signature: Signature,
    max_batch_size: int,
    warmed: Mapping[int, float],
    slo: float,
    config: ServerConfig,
) -> None:
    """Says which limits keep batches from ever being full. The batcher says it of its own."""
    in_time = [rows for rows, seconds in warmed.items() if seconds < slo]
    if warmed and len(in_time) < len(warmed):
        _log.warning(
            "model %s: a batch of %d rows took %.1f ms in warm-up, and --slo-ms is %g: batches will have at most %d rows",
            name,
            max(warmed),
            warmed[max(warmed)] * 1e3,
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
                "model %s: a row has %d bytes, so a batch of %d rows never fits --max-queue-bytes, %d: raise that",
                name,
                row,
                max_batch_size,
                config.max_queue_bytes,
            )


def _declared_padding(prepared: Prepared, config: ServerConfig) -> Padding | None:
    if config.pad_lengths is None:
        return None
    try:
        return declared_padding(prepared.io_mapping.signature, config.pad_lengths, dict(config.pad_values))
    except StartError as error:
        raise StartError(f"{prepared.file.source}: {error}") from None


def _decide_padding(
    name: str, prepared: Prepared, run: _Run, config: ServerConfig, declared: Padding | None
) -> Padding | None:
    """The padding, if it was asked for and is safe."""
    if declared is None or config.pad_lengths is None:
        return None
    if not prepared.settings.merges:
        how = "served unbatched" if not prepared.settings.max_batch_size else "not batched"
        _log.warning("model %s is not padded: it is %s, so nothing shares a batch", name, how)
        return None
    if prepared.io_mapping.signature.shared_inputs(batched=True):
        _log.warning("model %s is not padded: it has an input without a batch axis", name)
        return None
    if batching_policy(prepared.config, config) == "trust":
        _log.warning("model %s is padded without proof (--batching trust)", name)
        return declared
    reason = padding_dependence(
        prepared.io_mapping.signature,
        run,
        declared,
        config.pad_lengths.axis,
        prepared.size or 1,
        prepared.precision,
    )
    if reason:
        _log.warning(
            "model %s is not padded, each length has batches of its own: %s (--batching trust pads it anyway)",
            name,
            reason,
        )
        return None
    return declared
