"""What becomes of a model's file and configuration: how it is batched, what clients see, where it runs."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass

from tensorferry.protos.model_config_pb2 import ModelConfig
from tensorferry.server.batching_check.decision import (
    Candidate,
    decide_by_model_config,
    decide_by_server_config,
)
from tensorferry.server.config.server_config import ModelSource, ServerConfig
from tensorferry.server.errors import ModelConfigError
from tensorferry.server.model_config.instance_groups import instance_groups
from tensorferry.server.model_config.io_mapping import IoMapping, io_mapping_of
from tensorferry.server.model_config.pbtxt import BatchingDecision, complete, is_complete
from tensorferry.server.model_config.settings import ModelSettings, check_dynamic_batching, settings_of
from tensorferry.server.model_config.supported_fields import check_fields
from tensorferry.server.runtime.devices import available_devices
from tensorferry.server.runtime.fp16 import ModelFile, model_file
from tensorferry.server.runtime.ort_options import (
    has_gpu_options,
    ort_options_for,
    unknown_parameters,
    with_server_defaults,
)
from tensorferry.server.runtime.session import Session
from tensorferry.server.telemetry.load_progress import set_load_stage

_log = logging.getLogger("tensorferry.server")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model that is loaded and decided on, but neither warm nor served.

    `session` is its first instance, made from `file`, `size` one of the dimensions that vary besides the batch axis
    with which it runs (None: none is known), and `precision` that to which its instances compute FP32.
    """

    file: ModelFile
    session: Session
    io_mapping: IoMapping
    batching: BatchingDecision
    size: int | None
    settings: ModelSettings
    config: ModelConfig
    precision: float


def prepare(source: ModelSource, options: ServerConfig, device: str, scratch: ExitStack) -> Prepared:
    """Loads a model's first instance and decides on all else; StartError says what is at fault.

    What the instances are made from is there until `scratch` is closed.
    """
    asked = _asked(source)
    groups = instance_groups(asked, source.name, available_devices(options.device, device))
    devices = [place for group in groups for place in group.devices]
    own = asked or ModelConfig(name=source.name)
    _warn_of_unused_providers(source.name, own, devices)
    tuning = ort_options_for(with_server_defaults(own, options, devices), options, source.name)
    file = model_file(source.path, tuning.fp16, scratch)
    if tuning.fp16 is not None and "cpu" in devices:
        _log.warning(
            "model %s is in FP16 on the CPU, which has few operators for it and computes the others in FP32: it "
            "gets no faster there",
            source.name,
        )
    set_load_stage(f"making its session on {devices[0]}")
    session = file.session(devices[0], tuning)
    set_load_stage("checking whether rows of a batch affect each other")
    precision = max(tuning.precision(place) for place in devices)

    def completed(batching: BatchingDecision) -> ModelConfig:
        config = complete(
            asked,
            session.signature,
            batching,
            groups,
            options,
            name=source.name,
            filename=source.path.name,
            scalars_as_one=source.directory is not None,
        )
        return with_server_defaults(config, options, devices)

    if asked is None or (asked.max_batch_size == 0 and not is_complete(asked)):
        batching, size = decide_by_server_config(
            Candidate(source.name, session, session.signature, session.run, asked, options, precision)
        )
    else:
        # How requests are batched changes nothing of what they look like.
        io_mapping = io_mapping_of(
            completed(BatchingDecision(asked.max_batch_size, False, "")), session.signature
        )
        run = io_mapping.runner(session.run)
        batching, size = decide_by_model_config(
            Candidate(source.name, session, io_mapping.signature, run, asked, options, precision), asked
        )
    config = completed(batching)
    own_batching = asked is None or not asked.HasField("dynamic_batching")
    settings = settings_of(config, batching, groups, options, tuning, own=own_batching)
    return Prepared(
        file, session, io_mapping_of(config, session.signature), batching, size, settings, config, precision
    )


def _asked(source: ModelSource) -> ModelConfig | None:
    """The configuration that was given, with the model's name, once nothing in it is refused."""
    if source.config is None:
        return None
    asked = ModelConfig()
    asked.CopyFrom(source.config)
    asked.name = asked.name or source.name
    for warning in check_fields(asked, source.name):
        _log.warning("%s", warning)
    for parameter in unknown_parameters(asked):
        _log.warning(
            "the configuration of model %r has the parameter %r: nothing reads it", source.name, parameter
        )
    if asked.max_batch_size < 0:
        raise ModelConfigError(
            f"'max_batch_size' must be non-negative for {asked.name}, got {asked.max_batch_size}; give 0 for a model "
            "that is not batched, or leave it out"
        )
    if asked.max_batch_size:
        check_dynamic_batching(asked)
    return asked


def _warn_of_unused_providers(name: str, config: ModelConfig, devices: list[str]) -> None:
    if has_gpu_options(config) and "cpu" in devices:
        _log.warning(
            "the configuration of model %r has options of the GPU's execution providers, CUDA graphs or a priority: they "
            "change nothing of its instances on the CPU",
            name,
        )
    if config.optimization.execution_accelerators.cpu_execution_accelerator and set(devices) != {"cpu"}:
        _log.warning(
            "the configuration of model %r has a cpu_execution_accelerator: it changes nothing of its instances on "
            "GPUs",
            name,
        )
