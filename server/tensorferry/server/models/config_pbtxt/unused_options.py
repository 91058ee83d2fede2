"""Options of a model's table that have no effect, because of the model's own configuration or its devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tensorferry.protos.model_config_pb2 import ModelConfig
from tensorferry.server.config.option import OptionScope
from tensorferry.server.config.server_config import OPTIONS
from tensorferry.server.models.config_pbtxt.pbtxt import is_complete
from tensorferry.server.runtime.ort_options import BATCHING, has_providers, runs_on_cpu, runs_on_gpu

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


_SCHEDULER: tuple[str, _Decides] = (
    "dynamic_batching",
    lambda config: config.HasField("dynamic_batching"),
)
_SIZE: tuple[str, _Decides] = (
    "max_batch_size, or input and output",
    lambda config: config.max_batch_size > 0 or is_complete(config),
)
_WINDOW: tuple[str, _Decides] = (
    "how requests share batches",
    lambda config: config.HasField("dynamic_batching") or is_complete(config) or config.max_batch_size == 1,
)
# By the option's field: what of a model's configuration decides instead of the option, and whether it does.
_DECISIVE: Mapping[str, tuple[str, _Decides]] = {
    "max_batch_size": _SIZE,
    "max_queue_delay": _WINDOW,
    "preferred_batch_sizes": _WINDOW,
    "priority_weights": _SCHEDULER,
    "default_priority": _SCHEDULER,
    "batching": _parameter(BATCHING),
    "batching_rewrite": _SIZE,
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
        if not (("cpu" in devices and runs_on_cpu(name)) or (on_gpu and runs_on_gpu(name))):
            place = "the CPU" if runs_on_cpu(name) else "a GPU"
            yield f"the provider {name}, which has no effect: no instance of the model is on {place}"
