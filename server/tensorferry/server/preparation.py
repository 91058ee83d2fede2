"""What becomes of a model's file and configuration: how it is batched, what clients see, where it runs.

The rule where a configuration leaves max_batch_size open: a model that is proved batchable is batched, by the
options. Where it gives one, that holds, and the proof only says whether requests may share a batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tensorferry.protos.model_config_pb2 import ModelConfig
from tensorferry.server.config import ModelSource, ServerConfig
from tensorferry.server.contract import Contract, contract_of
from tensorferry.server.devices import machine_of
from tensorferry.server.fields import check_fields
from tensorferry.server.fp16 import ModelFile, file_of
from tensorferry.server.instances import instance_groups
from tensorferry.server.model_config import Batching, complete, is_complete
from tensorferry.server.proof import Array, prove, working_size
from tensorferry.server.session import Session
from tensorferry.server.session_options import (
    SessionOptions,
    session_options_of,
    unknown_parameters,
    with_flags,
)
from tensorferry.server.settings import ModelSettings, check_dynamic_batching, settings_of
from tensorferry.server.tuning import tuned
from tensorferry.server.words import words_of

_log = logging.getLogger("tensorferry.server")

_Run = Callable[[Mapping[str, Array]], dict[str, Array]]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model that is loaded and decided on, but neither warm nor served.

    `session` is its first instance, made from `file`, `size` one of the dimensions that vary besides the batch axis
    with which it runs (None: none is known), and `precision` that to which its instances compute FP32.
    """

    file: ModelFile
    session: Session
    contract: Contract
    batching: Batching
    size: int | None
    settings: ModelSettings
    config: ModelConfig
    precision: float


def prepare(source: ModelSource, options: ServerConfig, device: str, scratch: ExitStack) -> Prepared:
    """Loads a model's first instance and decides on all else; StartError says what is at fault.

    What the instances are made from is there until `scratch` is closed.
    """
    asked = _asked(source)
    groups = instance_groups(asked, source.name, machine_of(options.device, device))
    devices = [place for group in groups for place in group.devices]
    own = asked or ModelConfig(name=source.name)
    _warn_of_unused_providers(source.name, session_options_of(own), devices)
    tuning = tuned(session_options_of(with_flags(own, options, devices)), options, source.name)
    file = file_of(source.path, tuning.fp16, scratch)
    if tuning.fp16 is not None and "cpu" in devices:
        _log.warning(
            "model %s is in FP16 on the CPU, which has few operators for it and computes the others in FP32: it "
            "gets no faster there",
            source.name,
        )
    session = file.session(devices[0], tuning)
    precision = max(tuning.precision(place) for place in devices)

    def completed(batching: Batching) -> ModelConfig:
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
        return with_flags(config, options, devices)

    if asked is None or (asked.max_batch_size == 0 and not is_complete(asked)):
        batching, size = _own_rule(source.name, session, asked, options, precision)
    else:
        # How requests are batched changes nothing of what they look like.
        contract = contract_of(completed(Batching(asked.max_batch_size, False, "")), session.signature)
        run = contract.runner(session.run)
        batching, size = _as_asked(asked, contract, run, options, precision, source.path)
    config = completed(batching)
    own_batching = asked is None or not asked.HasField("dynamic_batching")
    settings = settings_of(config, batching, groups, options, own=own_batching)
    return Prepared(
        file, session, contract_of(config, session.signature), batching, size, settings, config, precision
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
    if asked.max_batch_size:
        check_dynamic_batching(asked)
    return asked


def _warn_of_unused_providers(name: str, tuning: SessionOptions, devices: list[str]) -> None:
    if (tuning.gpu or tuning.cuda or tuning.graphs or tuning.priority) and "cpu" in devices:
        _log.warning(
            "the configuration of model %r has options of the GPU's execution providers, CUDA graphs or a priority: they "
            "change nothing of its instances on the CPU",
            name,
        )
    if tuning.cpu and set(devices) != {"cpu"}:
        _log.warning(
            "the configuration of model %r has a cpu_execution_accelerator: it changes nothing of its instances on "
            "GPUs",
            name,
        )


def _own_rule(
    name: str, session: Session, asked: ModelConfig | None, options: ServerConfig, precision: float
) -> tuple[Batching, int | None]:
    """As the options say, if it is safe; and a size that warms the model up."""
    signature = session.signature
    if options.max_batch_size == 0:
        size, _ = working_size(signature, session.run)
        return Batching(0, False, "unbatched (--max-batch-size 0)"), size
    lacking = signature.lacks_batch_axis()
    if lacking is not None:
        _log.warning("model %s is served unbatched: %s", name, lacking)
        return Batching(0, False, f"unbatched ({lacking})"), working_size(signature, session.run)[0]
    window = options.max_queue_delay
    if asked is not None and asked.HasField("dynamic_batching"):
        window = asked.dynamic_batching.max_queue_delay_microseconds / 1e6
    if options.batching == "trust":
        _log.warning("model %s is batched without proof (--batching trust)", name)
        words = _words(options.max_batch_size, window, "trusted")
        return Batching(options.max_batch_size, True, words), working_size(signature, session.run)[0]
    verdict = prove(signature, session.run, words_of(session.path), precision)
    if not verdict.batchable:
        _log.warning(
            "model %s is served unbatched: %s (--batching trust batches it all the same)",
            name,
            verdict.reason,
        )
        return Batching(0, False, f"unbatched ({verdict.reason})"), verdict.size
    words = _words(options.max_batch_size, window, "proved")
    return Batching(options.max_batch_size, True, words), verdict.size


def _as_asked(
    asked: ModelConfig,
    contract: Contract,
    run: _Run,
    options: ServerConfig,
    precision: float,
    path: Path,
) -> tuple[Batching, int | None]:
    """As the configuration says, but that requests share no batch where that is shown to change answers."""
    name, most = asked.name, asked.max_batch_size
    explicit = asked.HasField("dynamic_batching")
    if most == 0:
        words = "unbatched (max_batch_size is 0 in its configuration)"
        return Batching(0, False, words), working_size(contract.signature, run)[0]
    if not explicit and (is_complete(asked) or most == 1):
        if most > 1:
            _log.info(
                "model %s: each request runs alone, as its configuration has no dynamic_batching; add "
                "'dynamic_batching { }' to it to have requests share batches",
                name,
            )
        words = f"requests of up to {most} rows, each alone (its configuration has no dynamic_batching)"
        return Batching(most, False, words), working_size(contract.signature, run)[0]
    window = (
        asked.dynamic_batching.max_queue_delay_microseconds / 1e6 if explicit else options.max_queue_delay
    )
    if options.batching == "trust":
        _log.warning("model %s is batched without proof (--batching trust)", name)
        return Batching(most, True, _words(most, window, "trusted")), working_size(contract.signature, run)[0]
    verdict = prove(contract.signature, run, words_of(path), precision)
    if verdict.batchable:
        return Batching(most, True, _words(most, window, "proved")), verdict.size
    if explicit and verdict.size is None:
        _log.warning("model %s is batched without proof, as its configuration says: %s", name, verdict.reason)
        return Batching(most, True, _words(most, window, "as its configuration says")), None
    _log.warning(
        "model %s: each request runs alone: %s (--batching trust has them share batches all the same)",
        name,
        verdict.reason,
    )
    return Batching(
        most, False, f"requests of up to {most} rows, each alone ({verdict.reason})"
    ), verdict.size


def _words(most: int, window: float, how: str) -> str:
    after = f" after at most {window * 1e3:g} ms" if window else ""
    return f"batches of up to {most} rows{after} ({how})"
