"""Loading of an ONNX model: preparation, padding, sessions."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tensorferry.batcher import Padding, StagedModel
from tensorferry.server.config.server_config import ModelSource, ServerConfig
from tensorferry.server.errors import StartError
from tensorferry.server.observability.logs.load_progress import set_load_stage
from tensorferry.server.onnx.graph import operator_types, value_dependent_nodes
from tensorferry.server.onnx.graph.rules.random_numbers import RANDOM_OPERATORS
from tensorferry.server.onnx.loading.padding_check import decide_padding, declared_padding
from tensorferry.server.onnx.loading.preparation import PreparedModel, prepare_model
from tensorferry.server.onnx.loading.row_padding import RaggedInput, with_default_padding
from tensorferry.server.onnx.loading.session_factory import SessionFactory
from tensorferry.server.onnx.loading.warmup_samples import warmup_samples
from tensorferry.server.onnx.probes.empty_axes_probe import EmptyAxesProbe, ProbedModel
from tensorferry.server.python.steps.loaded_step import LoadedStep, StepInstance
from tensorferry.server.runtime.checks.check_cache import CheckCache
from tensorferry.server.runtime.checks.load_budget import LoadBudget
from tensorferry.server.runtime.checks.sampling import Array, Run, random_inputs, varies, working_size
from tensorferry.server.runtime.files.fp16 import IN_FP16, check_accuracy, model_file
from tensorferry.server.runtime.files.op_libraries import OpLibrary, replacing_library
from tensorferry.server.runtime.host_memory import GrowthCheck, check_fits
from tensorferry.server.runtime.ort_options import Fp16
from tensorferry.server.runtime.recovery.instance_health import InstanceHealth
from tensorferry.server.runtime.recovery.recovering_instance import RecoveringInstance, RecoveringStagedModel
from tensorferry.server.runtime.recovery.watchdog import RunLimits, Watchdog
from tensorferry.server.runtime.session import Session
from tensorferry.server.signature import Signature

_log = logging.getLogger("tensorferry.server")

# Random inputs that are run in both FP16 and FP32, beside the samples of the configuration, and the rows of each.
_FP16_CHECKS, _FP16_CHECK_ROWS = 3, 4

# Verdicts that a longer comparison could not change.
_SETTLED = ("proved", "tested")


def load_onnx_step(
    source: ModelSource,
    config: ServerConfig,
    device: str,
    watchdog: Watchdog | None,
    ragged: Mapping[str, RaggedInput],
    *,
    moves_axes: bool,
    new_budget: Callable[[], LoadBudget] = LoadBudget,
) -> LoadedStep:
    """Load an ONNX model and check it. StartError names the file and the reason.

    `ragged` has inputs that a function of the same pipeline makes, with rows of different lengths. `moves_axes` and
    `new_budget` are as in `prepare_model`.
    """
    started = time.monotonic()
    with ExitStack() as scratch:
        prepared = prepare_model(
            source, config, device, scratch, new_budget=new_budget, moves_axes=moves_axes
        )
        settings, io_mapping = prepared.settings, prepared.io_mapping
        config = with_default_padding(config, source.name, io_mapping.signature, ragged)
        loaded = _load_sessions(source, config, prepared)
        steady = (
            "cpu" in settings.devices
            and replacing_library(settings.ort_options.op_libraries) is None
            and _is_steady(source.path, prepared.cache)
        )
        impure = _impurity(source.path, settings.ort_options.op_libraries)
        # After all that reads the files, because the sessions and what was found must be of the same ones.
        if prepared.files.has_changed():
            raise StartError(f"{source.path}: its files have changed while it was loaded; load it again")
        probed = ProbedModel(
            source.name,
            prepared.file.path,
            settings.ort_options,
            io_mapping,
            settings.max_batch_size,
            prepared.working_size,
        )
        probe = EmptyAxesProbe(probed, prepared.cache, scratch.pop_all())
    load_seconds = time.monotonic() - started
    _log.info(
        "model %s version %s loaded from %s on %s in %.2f s: its session took %.2f s, checks and warm-up %.2f s%s",
        source.name,
        source.version,
        source.path,
        _device_counts(settings.devices),
        load_seconds,
        prepared.session_seconds,
        prepared.budget.used(),
        "" if loaded.runs else "; it does not run on random input",
    )
    # After the model is loaded, because its process competes for the cores.
    probe.start()
    rebuild = partial(loaded.factory.rebuild, runs=loaded.runs)
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
        close = probe.close if number == 0 else (lambda: None)
        return StepInstance(io_mapping.runner(instance.run), instance.on_hang, staged, close)

    return LoadedStep(
        name=source.name,
        signature=io_mapping.signature,
        settings=settings,
        config=prepared.config,
        decision=prepared.batching,
        batching=loaded.batching,
        make_instance=make_instance,
        run_seconds=prepared.run_seconds,
        # Without fixed shapes, a run's time depends on more than the rows.
        warmup={} if varies(io_mapping.signature) else prepared.run_seconds,
        padding=loaded.padding,
        empty_axes=probe.found,
        steady=steady,
        open_layout=prepared.layouts.open,
        open_checks=prepared.budget.ran_out and prepared.batching.verdict not in _SETTLED,
        impure=impure,
    )


def _is_steady(path: Path, cache: CheckCache) -> bool:
    """Return whether the run time depends on shapes alone, as the graph or an earlier load says."""
    if cache.get("steady", ()) is True:
        return True
    steady = not value_dependent_nodes(path)
    if steady:
        # Otherwise the reason may be an error, which the next load does not have.
        cache.put("steady", (), steady)
    return steady


def _impurity(path: Path, libraries: Sequence[OpLibrary]) -> str:
    """Return why a model may give equal inputs different outputs; "" if it cannot."""
    operators = operator_types(path)
    if not operators:
        return "its graph cannot be read"
    if libraries:
        return "it has custom operators, whose outputs may differ from run to run"
    if found := sorted(operators & RANDOM_OPERATORS):
        return f"its operator {found[0]} may draw random numbers"
    return ""


class _LoadedSessions(NamedTuple):
    """A model's sessions.

    `runs` says whether they run random input. `batching` describes batching and padding to people.
    """

    factory: SessionFactory
    sessions: Sequence[Session]
    runs: bool
    padding: Padding | None
    batching: str


def _load_sessions(source: ModelSource, config: ServerConfig, prepared: PreparedModel) -> _LoadedSessions:
    settings, signature = prepared.settings, prepared.io_mapping.signature
    samples = warmup_samples(prepared.config, signature, source.directory)
    declared = declared_padding(prepared, config)
    _check_batches_fit(source.name, settings.max_batch_size, config.max_queue_size, signature)
    set_load_stage("checking padding")
    run_first = prepared.io_mapping.runner(prepared.session.run)
    padding = decide_padding(source.name, prepared, run_first, config, declared)
    batching = prepared.batching.description
    padded_sizes: list[Mapping[str, int]] = [{}]
    if padding is not None and config.pad_lengths is not None:
        axis, lengths = config.pad_lengths
        padded_sizes = [{axis: length} for length in lengths]
        batching += f", padded along {axis!r} to {', '.join(map(str, lengths))}"
    factory = SessionFactory(
        source,
        prepared.io_mapping,
        settings,
        samples,
        prepared.working_size,
        padded_sizes,
        config.max_queue_size,
        prepared.files,
    )
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
        sessions.append(factory.session(prepared.file, device))
    if prepared.file.changes == IN_FP16 and settings.ort_options.fp16 is not None:
        inputs = [sample.inputs for sample in samples]
        _check_fp16(source.name, prepared, run_first, padded_sizes[-1], inputs, settings.ort_options.fp16)
    set_load_stage("capturing CUDA graphs and warming up")
    captured = [factory.capture(session) for session in sessions]
    if captured[0]:
        _log.info("model %s: CUDA graphs for batches of %s", source.name, ", ".join(map(str, captured[0])))
    known = prepared.working_size is not None
    ran = [factory.warm_up(session, ran=known and session is prepared.session) for session in sessions]
    return _LoadedSessions(factory, sessions, any(ran), padding, batching)


def _check_batches_fit(name: str, max_batch_size: int, most: int, signature: Signature) -> None:
    """Raise StartError if there is not enough memory for the inputs and outputs of a batch alone.

    No batch has more than `most` rows, because the queue holds no more.
    """
    rows = min(max(1, max_batch_size), most)
    row_bytes = sum(
        math.prod(dim for dim in spec.dims[1:] if isinstance(dim, int)) * spec.datatype.size
        for spec in signature.inputs + signature.outputs
    )
    check_fits(
        f"model {name!r}: input and output of a batch of {rows} rows",
        row_bytes * rows,
        f"lower max_batch_size, which is {max_batch_size}",
    )


def _check_fp16(
    name: str,
    prepared: PreparedModel,
    run: Run,
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
    inputs = [*samples]
    if size is not None:
        inputs += [random_inputs(signature, rows, size, seed, sizes) for seed in range(_FP16_CHECKS)]
    check_accuracy(name, signature, run, in_fp32, inputs, fp16.tolerance)


def _device_counts(devices: tuple[str, ...]) -> str:
    return ", ".join(
        device if count == 1 else f"{count} × {device}" for device, count in Counter(devices).items()
    )
