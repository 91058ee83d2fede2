"""Preparation of a model: decides from its file and configuration how it is batched, what clients see and where it runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace

from tensorferry.protos.model_config_pb2 import ModelConfig
from tensorferry.server.config.model_tables import table_name
from tensorferry.server.config.server_config import ModelSource, ServerConfig
from tensorferry.server.errors import ModelConfigError
from tensorferry.server.models.config_pbtxt.instance_groups import instance_groups
from tensorferry.server.models.config_pbtxt.io_mapping import IoMapping, io_mapping_of
from tensorferry.server.models.config_pbtxt.pbtxt import BatchingDecision, complete_config, is_complete
from tensorferry.server.models.config_pbtxt.sequence_batching import configured_sequences, with_batching
from tensorferry.server.models.config_pbtxt.settings import ModelSettings, check_dynamic_batching, settings_of
from tensorferry.server.models.config_pbtxt.supported_fields import check_fields
from tensorferry.server.models.config_pbtxt.unused_options import unused_options
from tensorferry.server.observability.logs.load_progress import set_load_stage
from tensorferry.server.onnx.batching.decision import (
    Candidate,
    decide_by_model_config,
    decide_by_server_config,
)
from tensorferry.server.onnx.loading.chosen_layout import ChosenLayout, layouts_to_choose
from tensorferry.server.onnx.loading.rewriting import RewrittenModel, rewritten
from tensorferry.server.runtime.checks.check_cache import CheckCache
from tensorferry.server.runtime.checks.load_budget import LoadBudget
from tensorferry.server.runtime.checks.sampling import Run
from tensorferry.server.runtime.checks.trial_runs import limit_trial_runs
from tensorferry.server.runtime.devices import available_devices
from tensorferry.server.runtime.files.file_record import FileRecord
from tensorferry.server.runtime.files.fp16 import ModelFile, model_file
from tensorferry.server.runtime.files.op_libraries import libraries_for
from tensorferry.server.runtime.ort_options import (
    has_gpu_options,
    ort_options_for,
    unknown_parameters,
    with_server_defaults,
)
from tensorferry.server.runtime.session import Session
from tensorferry.server.signature import Signature

_log = logging.getLogger("tensorferry.server")


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model with its first session.

    `session` is made from `file` for the first instance. `working_size` is a length of the dynamic axes, besides the
    batch axis, with which the model runs; None if none was found. `run_seconds` has the time of one row and of two, by rows,
    as far as they were run. `precision` is the relative precision of its FP32 outputs on its devices. `cache` has what
    checks of its file found, and `budget` the time that they may take. Making the session took `session_seconds`.
    `layouts` has those of the cores that can be chosen for it. `files` is the record of its files, made before they were read.
    """

    file: ModelFile
    session: Session
    io_mapping: IoMapping
    batching: BatchingDecision
    working_size: int | None
    settings: ModelSettings
    config: ModelConfig
    precision: float
    run_seconds: Mapping[int, float]
    cache: CheckCache
    budget: LoadBudget
    session_seconds: float
    layouts: ChosenLayout
    files: FileRecord


def prepare_model(
    source: ModelSource,
    server_config: ServerConfig,
    device: str,
    scratch: ExitStack,
    *,
    new_budget: Callable[[], LoadBudget] = LoadBudget,
    moves_axes: bool = True,
) -> PreparedModel:
    """Load a model's first session and decide how it is served; StartError gives the reason of a failure.

    `server_config` has the options of this model, as `ServerConfig.for_model` returns them. The model's converted file
    exists until `scratch` is closed. `new_budget` makes the budget of the checks, once the session is made. Clients' tensors
    have their rows on axis 0 unless it `moves_axes`.
    """
    return limit_trial_runs(
        source.name,
        server_config.run_timeout,
        lambda: _prepare(source, server_config, device, scratch, new_budget, moves_axes),
    )


def _prepare(
    source: ModelSource,
    server_config: ServerConfig,
    device: str,
    scratch: ExitStack,
    new_budget: Callable[[], LoadBudget],
    moves_axes: bool,
) -> PreparedModel:
    requested = _requested_config(source)
    machine = available_devices(server_config.device, device)
    groups = instance_groups(requested, source.name, machine, server_config.instances or 1)
    devices = [name for group in groups for name in group.devices]
    for unused in unused_options(server_config.model_options.get(source.name, {}), requested, devices):
        _log.warning("%s has %s", table_name(source.name), unused)
    base = requested or ModelConfig(name=source.name)
    _warn_about_unused_providers(source.name, base, devices)
    base = with_server_defaults(base, server_config, devices)
    ort_options = replace(
        ort_options_for(base, server_config, source.name),
        op_libraries=libraries_for(base, source, server_config.custom_ops),
    )
    # Before the file is read, so that no result is used or kept for a file that was replaced meanwhile.
    cache = CheckCache(source.path, ort_options, devices)
    files = cache.files
    file = model_file(source.path, ort_options, scratch)
    if ort_options.fp16 is not None and "cpu" in devices:
        _log.warning(
            "model %s: it is in FP16 on the CPU, which computes most operators in FP32, so it does not get faster there",
            source.name,
        )
    layouts = ChosenLayout(cache, layouts_to_choose(server_config, base, devices, ort_options))
    if layout := layouts.get():
        groups = instance_groups(requested, source.name, machine, layout.sessions)
        devices = [name for group in groups for name in group.devices]
        ort_options = replace(ort_options, intra_op_threads=layout.threads)
    set_load_stage(f"making its session on {devices[0]}")
    started = time.perf_counter()
    session = file.session(devices[0], ort_options)
    session_seconds = time.perf_counter() - started
    session.limit_memory()
    budget = new_budget()
    set_load_stage("checking whether rows of a batch affect each other")
    precision = max(ort_options.precision(name) for name in devices)

    def completed(decision: BatchingDecision, signature: Signature) -> ModelConfig:
        return complete_config(base, source, signature, decision, groups, server_config)

    def candidate(signature: Signature, run: Run) -> Candidate:
        return Candidate(
            source.name, session, signature, run, requested, server_config, precision, cache, budget
        )

    batch_axes: Mapping[str, int] = {}
    if requested is None or (requested.max_batch_size == 0 and not is_complete(requested)):
        checked = candidate(session.signature, session.run)
        has_batch_axis = session.signature.no_batch_axis_reason() is None
        copy: RewrittenModel | tuple[str, ...] = ()
        decided = decide_by_server_config(checked) if has_batch_axis else None
        if decided is None or decided.batching.verdict == "refused":
            copy = rewritten(checked, file, ort_options, scratch, moves_axes=moves_axes)
        if isinstance(copy, RewrittenModel):
            file, session, ort_options = copy.file, copy.session, copy.ort_options
            decided, cache, batch_axes = copy.decided, copy.cache, copy.batch_axes
        elif decided is None:
            decided = decide_by_server_config(checked, copy)
        if decided.warning:
            _log.warning("%s", decided.warning)
    else:
        # The shape of requests follows from max_batch_size alone, so the I/O mapping is known before the decision.
        undecided = BatchingDecision(requested.max_batch_size, False, "")
        mapping = io_mapping_of(completed(undecided, session.signature), session.signature)
        checked = candidate(mapping.signature, mapping.runner(session.run))
        decided = decide_by_model_config(checked, requested)
    batching = decided.batching
    config = completed(batching, session.signature)
    generated = requested is None or not requested.HasField("dynamic_batching")
    settings = settings_of(config, batching, groups, server_config, ort_options, generated=generated)
    io_mapping = io_mapping_of(config, session.signature)
    if batch_axes:
        signature = io_mapping.signature.with_batch_axes(batch_axes)
        io_mapping = replace(io_mapping, signature=signature)
        # To clients, max_batch_size means that the rows are on axis 0.
        config = completed(replace(batching, max_batch_size=0, merges=False), signature)
    if not settings.merges:
        # A request that runs whole must not fail by a prediction.
        session.batch_memory = None
    return PreparedModel(
        file,
        session,
        io_mapping,
        batching,
        decided.working_size,
        settings,
        config,
        precision,
        decided.seconds,
        cache,
        budget,
        session_seconds,
        layouts,
        files,
    )


def _requested_config(source: ModelSource) -> ModelConfig | None:
    """Return the source's configuration with the model's name; raise if a field is not supported."""
    if source.config is None:
        return None
    requested = ModelConfig()
    requested.CopyFrom(source.config)
    requested.name = requested.name or source.name
    for warning in check_fields(requested, source.name):
        _log.warning("%s", warning)
    for parameter in unknown_parameters(requested):
        _log.warning(
            "the configuration of model %r has the parameter %r, which is unknown and ignored",
            source.name,
            parameter,
        )
    if requested.max_batch_size < 0:
        raise ModelConfigError(
            f"'max_batch_size' must be non-negative for {requested.name}, got {requested.max_batch_size}; give 0 for a model "
            "that is not batched, or leave it out"
        )
    if configured_sequences(requested, source.name, source.directory) is not None:
        requested = with_batching(requested)
    if requested.max_batch_size:
        check_dynamic_batching(requested)
    return requested


def _warn_about_unused_providers(name: str, config: ModelConfig, devices: list[str]) -> None:
    if has_gpu_options(config) and "cpu" in devices:
        _log.warning(
            "the configuration of model %r has options of the GPU's execution providers, CUDA graphs or a priority; they "
            "have no effect on its instances on the CPU",
            name,
        )
    if config.optimization.execution_accelerators.cpu_execution_accelerator and set(devices) != {"cpu"}:
        _log.warning(
            "the configuration of model %r has a cpu_execution_accelerator; it has no effect on its instances on GPUs",
            name,
        )
