"""Options of a model's table that have no effect, because of the model's own configuration or its devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tensorferry.protos.model_config_pb2 import ModelConfig
from tensorferry.server.config.option import OptionScope
from tensorferry.server.config.server_config import OPTIONS
from tensorferry.server.models.config_pbtxt.pbtxt import is_complete
from tensorferry.server.runtime.ort_options import BATCHING, has_providers, runs_on_cpu, usable_providers

_Decides = Callable[[ModelConfig], bool]


def _parameter(name: str) -> tuple[str, _Decides]:
    return f"the parameter {name}", lambda config: name in config.parameters


def _cuda_parameter(name: str) -> tuple[str, _Decides]:
    def decides(config: ModelConfig) -> bool:
        accelerators = config.optimization.execution_accelerators.gpu_execution_accelerator
        return name in config.parameters or any(
            name in accelerator.parameters for accelerator in accelerators if accelerator.name == "cuda"
        )

    return f"the parameter {name}", decides


def _has_scheduler(config: ModelConfig) -> bool:
    return config.HasField("dynamic_batching")


def _decides_window(config: ModelConfig) -> bool:
    return _has_scheduler(config) or is_complete(config) or config.max_batch_size == 1


# By the option's field: what of a model's configuration decides instead of the option, and whether it does.
_DECISIVE: Mapping[str, tuple[str, _Decides]] = {
    "max_batch_size": (
        "max_batch_size, or input and output",
        lambda config: config.max_batch_size > 0 or is_complete(config),
    ),
    "max_queue_delay": ("how requests share batches", _decides_window),
    "preferred_batch_sizes": ("how requests share batches", _decides_window),
    "priority_weights": ("dynamic_batching", _has_scheduler),
    "default_priority": ("dynamic_batching", _has_scheduler),
    "batching": _parameter(BATCHING),
    "batching_rewrite": (
        "max_batch_size, or input and output",
        lambda config: config.max_batch_size > 0 or is_complete(config),
    ),
    "instances": ("instance_group", lambda config: bool(config.instance_group)),
    "threads": _parameter("intra_op_thread_count"),
    "providers": ("execution_accelerators", has_providers),
    "cuda_graphs": ("optimization.cuda.graphs", lambda config: config.optimization.cuda.graphs),
    "cuda_memory_bytes": _cuda_parameter("gpu_mem_limit"),
    "tf32": _cuda_parameter("use_tf32"),
    "fp16": _parameter("fp16"),
    "fp16_tolerance": _parameter("fp16_tolerance"),
}


def unused_options(
    options: Mapping[str, Any], requested: ModelConfig | None, devices: Sequence[str]
) -> Iterator[str]:
    """Yield a text for each option without effect: its name, and why.

    `options` are those of the model's table by field, `requested` is its configuration, and `devices` are those of its
    instances.
    """
    on_gpu = bool(set(devices) - {"cpu"})
    for option in OPTIONS:
        if option.field not in options:
            continue
        what, decides = _DECISIVE.get(option.field, ("", lambda config: False))
        if requested is not None and decides(requested):
            yield (
                f"{option.flag}, which has no effect: the model's own configuration comes first, and it sets {what}"
            )
        elif not on_gpu and (option.scope is OptionScope.CUDA or option.field == "cuda_graphs"):
            yield f"{option.flag}, which has no effect: no instance of the model is on a GPU"
    providers = options.get("providers", ())
    for name in providers if requested is None or not has_providers(requested) else ():
        if name not in usable_providers(providers, devices):
            place = "the CPU" if runs_on_cpu(name) else "a GPU"
            yield f"the provider {name}, which has no effect: no instance of the model is on {place}"
