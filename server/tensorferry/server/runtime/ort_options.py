"""How a configuration tunes ONNX Runtime: by the names and values that Triton's backend for it reads."""

from __future__ import annotations

import enum
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tensorferry.protos.model_config_pb2 import ModelConfig, ModelOptimizationPolicy
from tensorferry.server.config.server_config import ServerConfig
from tensorferry.server.errors import ModelConfigError
from tensorferry.server.gpu.cuda_graphs import GraphOptions, GraphSpec

# By optimization.graph.level.
_GRAPH_LEVELS = {-1: "basic", 0: "all", 1: "extended", 2: "none"}
_BOOLEANS = {"0": False, "false": False, "1": True, "true": True}

# How a model is batched, in place of --batching: `batching_check` reads it.
BATCHING = "batching"
ARENA_SHRINKAGE = "memory.enable_memory_arena_shrinkage"
DEVICE_ALLOCATOR = "session.use_device_allocator_for_initializers"
# Options of the CUDA provider that may stand among the parameters, the older way.
_CUDA_PARAMETERS: Mapping[str, Sequence[str] | None] = {
    "cudnn_conv_algo_search": ("EXHAUSTIVE", "HEURISTIC", "DEFAULT"),
    "gpu_mem_limit": None,
    "arena_extend_strategy": ("kNextPowerOfTwo", "kSameAsRequested"),
    "do_copy_in_default_stream": ("0", "1"),
    "use_tf32": ("0", "1"),
}
# Of these an execution accelerator may have any, but no addresses: ONNX Runtime would jump to them. The device is
# the instance's.
_REFUSED = {
    "device_id": "the device is said by instance_group",
    **dict.fromkeys(
        (
            "user_compute_stream",
            "has_user_compute_stream",
            "gpu_external_alloc",
            "gpu_external_free",
            "gpu_external_empty_cache",
            "trt_onnx_bytestream",
            "trt_external_data_bytestream",
        ),
        "it is of programs that hand over addresses in their own memory",
    ),
}
# Of a session. ONNX Runtime's threads wait by spinning: to make 512 on two cores takes ten seconds, in which little else
# runs.
_MOST_THREADS = max(64, 4 * (os.cpu_count() or 1))
_FP16_PARAMETERS = ("fp16", "fp16_tolerance", "fp16_except")
_PARAMETERS = (
    "intra_op_thread_count",
    "inter_op_thread_count",
    "execution_mode",
    "enable_mem_arena",
    "enable_mem_pattern",
    ARENA_SHRINKAGE,
    DEVICE_ALLOCATOR,
    BATCHING,
    *_CUDA_PARAMETERS,
    *_FP16_PARAMETERS,
)

# TensorRT's options have names of ONNX Runtime's, `trt_...`, but for these.
_TENSORRT_NAMES = {
    "max_workspace_size_bytes": "trt_max_workspace_size",
    "int8_calibration_table_name": "trt_int8_calibration_table_name",
    "int8_use_native_calibration_table": "trt_int8_use_native_calibration_table",
}
_PRECISIONS: Mapping[str, Mapping[str, str]] = {
    "FP32": {},
    "FP16": {"trt_fp16_enable": "1"},
    "BF16": {"trt_bf16_enable": "1"},
    "INT8": {"trt_int8_enable": "1"},
}
# In the order of ONNX Runtime's numbers.
_GROWTHS = ("doubling", "exact")
_SEARCHES = ("exhaustive", "heuristic", "default")

# What rounding to so many bits of a mantissa, over the layers of a model, may come to: as the proof has it for
# outputs that are FP16 and BF16.
_OF_11_BITS = 1e-2
_OF_8_BITS = 5e-2

# Set by the server where graphs are wanted: each is captured by it, for batches of one size.
_GRAPH_OPTIONS = ("enable_cuda_graph", "trt_cuda_graph_enable")


class KernelPriority(enum.Enum):
    """Whose kernels a GPU starts first, of models that it computes at the same time."""

    FIRST = "before those of other models"
    LAST = "after those of other models"


_PRIORITIES = {
    ModelOptimizationPolicy.PRIORITY_MAX: KernelPriority.FIRST,
    ModelOptimizationPolicy.PRIORITY_MIN: KernelPriority.LAST,
}


@dataclass(frozen=True, slots=True)
class ExecutionProvider:
    """An execution provider of ONNX Runtime, by its name there, and its options."""

    name: str
    options: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Fp16:
    """That a model is converted to FP16, but for operators or nodes by these names.

    `tolerance` is how far its outputs may then be off, relative to their greatest magnitudes.
    """

    tolerance: float
    excepted: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OrtOptions:
    """What a session is made with; 0 threads are ONNX Runtime's own choice.

    `graph` is what the graph optimizer does: all, extended, basic or none. `gpu` are the providers of a session
    on a GPU before the CUDA provider, whose options are `cuda`; `cpu` those of one on the CPU. `graphs` are the
    CUDA graphs of one on a GPU, whose kernels have a `priority`.
    """

    graph: str = "all"
    intra_op_threads: int = 0
    inter_op_threads: int = 0
    parallel: bool = False
    memory_arena: bool = True
    memory_pattern: bool = True
    arena_shrinkage: str = ""
    device_allocator: str = ""
    cuda: tuple[tuple[str, str], ...] = ()
    gpu: tuple[ExecutionProvider, ...] = ()
    cpu: tuple[ExecutionProvider, ...] = ()
    fp16: Fp16 | None = None
    graphs: GraphOptions | None = None
    priority: KernelPriority | None = None

    def precision(self, device: str) -> float:
        """To how much, relative to its greatest magnitude, a device computes an output that is FP32."""
        if device != "cpu":
            accelerated = {name for provider in self.gpu for name, value in provider.options if value == "1"}
            if accelerated & {"trt_bf16_enable", "trt_int8_enable"}:
                return _OF_8_BITS
            if "trt_fp16_enable" in accelerated or ("use_tf32", "0") not in self.cuda:
                return _OF_11_BITS
        return _OF_11_BITS if self.fp16 is not None else 0.0


def with_server_defaults(config: ModelConfig, options: ServerConfig, devices: Sequence[str]) -> ModelConfig:
    """A copy that has, for a model on these devices, what the options say and it leaves open, as parameters."""
    completed = ModelConfig()
    completed.CopyFrom(config)
    defaults = ServerConfig(())
    given: dict[str, str] = {}
    if set(devices) - {"cpu"}:
        if options.cuda_memory_bytes is not None:
            given["gpu_mem_limit"] = str(options.cuda_memory_bytes)
        if options.cuda_memory_growth != defaults.cuda_memory_growth:
            given["arena_extend_strategy"] = str(_GROWTHS.index(options.cuda_memory_growth))
        if options.cudnn_search != defaults.cudnn_search:
            given["cudnn_conv_algo_search"] = str(_SEARCHES.index(options.cudnn_search))
        if options.tf32 != defaults.tf32:
            given["use_tf32"] = str(int(options.tf32))
    for accelerator in config.optimization.execution_accelerators.gpu_execution_accelerator:
        if accelerator.name == "cuda":
            for name in accelerator.parameters:
                given.pop(name, None)
    if _Reader(config).boolean("fp16", options.fp16):
        given["fp16"] = "1"
        if options.fp16_tolerance != defaults.fp16_tolerance:
            given["fp16_tolerance"] = str(options.fp16_tolerance)
        if options.fp16_except:
            given["fp16_except"] = ",".join(options.fp16_except)
    for name, value in given.items():
        if name not in completed.parameters:
            completed.parameters[name].string_value = value
    return completed


def unknown_parameters(config: ModelConfig) -> Sequence[str]:
    """The parameters that nothing here reads."""
    return sorted(key for key in config.parameters if key not in _PARAMETERS)


def parse_ort_options(config: ModelConfig) -> OrtOptions:
    """The options that a configuration asks for; ModelConfigError names a value that is not allowed."""
    read = _Reader(config)
    accelerators = config.optimization.execution_accelerators
    cuda = read.cuda()
    providers = []
    for accelerator in accelerators.gpu_execution_accelerator:
        if accelerator.name == "cuda":
            cuda.update(accelerator.parameters)
        elif accelerator.name == "tensorrt":
            options = _tensorrt(accelerator.parameters, config.name)
            providers.append(ExecutionProvider("TensorrtExecutionProvider", tuple(sorted(options.items()))))
        else:
            raise _unknown(accelerator, "gpu", "tensorrt and cuda", config.name)
    for accelerator in accelerators.cpu_execution_accelerator:
        if accelerator.name != "openvino":
            raise _unknown(accelerator, "cpu", "openvino", config.name)
        if accelerator.parameters:
            raise ModelConfigError(
                f"model {config.name!r}: cpu_execution_accelerator openvino has parameters "
                f"{sorted(accelerator.parameters)}; it takes none"
            )
    for name, value in [*cuda.items(), *(option for provider in providers for option in provider.options)]:
        if name in _REFUSED:
            raise ModelConfigError(
                f"model {config.name!r} has {name} {value!r} for an execution accelerator: {_REFUSED[name]}; leave it out"
            )
        if name in _GRAPH_OPTIONS and _BOOLEANS.get(value.lower()) is not False:
            raise ModelConfigError(
                f"model {config.name!r} has {name} {value!r}: leave it out; CUDA graphs are asked for by "
                "optimization { cuda { graphs: true } }"
            )
    if "cpu" in read.text(ARENA_SHRINKAGE) and not read.boolean("enable_mem_arena"):
        raise ModelConfigError(
            f"model {config.name!r}: parameter {ARENA_SHRINKAGE} is {read.text(ARENA_SHRINKAGE)!r}, but "
            "enable_mem_arena is 0: there is no arena to shrink, and every run would fail; leave out one of them"
        )
    level = config.optimization.graph.level
    if level not in _GRAPH_LEVELS:
        raise ModelConfigError(
            f"model {config.name!r}: optimization.graph.level is {level}; it must be -1 (basic), 0 (all), 1 (extended) "
            "or 2 (none)"
        )
    return OrtOptions(
        graph=_GRAPH_LEVELS[level],
        intra_op_threads=read.natural("intra_op_thread_count", _MOST_THREADS),
        inter_op_threads=read.natural("inter_op_thread_count", _MOST_THREADS),
        parallel=bool(read.choice("execution_mode", ("0", "1"))),
        memory_arena=read.boolean("enable_mem_arena"),
        memory_pattern=read.boolean("enable_mem_pattern"),
        arena_shrinkage=read.text(ARENA_SHRINKAGE),
        device_allocator=read.text(DEVICE_ALLOCATOR),
        cuda=tuple(sorted(cuda.items())),
        gpu=tuple(providers),
        cpu=tuple(
            ExecutionProvider("OpenVINOExecutionProvider", (("device_type", "CPU"),))
            for _ in accelerators.cpu_execution_accelerator
        ),
        fp16=read.fp16(),
        graphs=_graphs(config),
        priority=_PRIORITIES.get(config.optimization.priority),
    )


def _graphs(config: ModelConfig) -> GraphOptions | None:
    cuda = config.optimization.cuda
    if not cuda.graphs:
        return None
    for spec in cuda.graph_spec:
        if spec.batch_size < 0 or any(dim < 1 for shape in spec.input.values() for dim in shape.dim):
            raise ModelConfigError(
                f"model {config.name!r}: a graph_spec of optimization.cuda has batch_size {spec.batch_size} and inputs "
                f"{ {name: list(shape.dim) for name, shape in spec.input.items()} }; sizes must be at least 1, and "
                "batch_size is left out for a model without batch axis"
            )
    specs = [
        GraphSpec(
            spec.batch_size, tuple((name, tuple(shape.dim)) for name, shape in sorted(spec.input.items()))
        )
        for spec in cuda.graph_spec
    ]
    return GraphOptions(tuple(dict.fromkeys(specs)), required=True)


def _unknown(
    accelerator: ModelOptimizationPolicy.ExecutionAccelerators.Accelerator, kind: str, known: str, model: str
) -> ModelConfigError:
    return ModelConfigError(
        f"model {model!r}: unknown Execution Accelerator {accelerator.name!r} is requested as "
        f"{kind}_execution_accelerator; known are {known}"
    )


def _tensorrt(parameters: Mapping[str, str], model: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for name, value in parameters.items():
        if name == "precision_mode":
            if value not in _PRECISIONS:
                raise ModelConfigError(
                    f"model {model!r}: unsupported precision mode {value!r} is requested; it must be one of "
                    f"{', '.join(_PRECISIONS)}"
                )
            options.update(_PRECISIONS[value])
        elif name in _TENSORRT_NAMES:
            options[_TENSORRT_NAMES[name]] = value
        elif name.startswith("trt_"):
            options[name] = value
        else:
            raise ModelConfigError(
                f"model {model!r}: unknown parameter {name!r} is provided for TensorRT Execution Accelerator; known "
                f"are precision_mode, {', '.join(_TENSORRT_NAMES)} and ONNX Runtime's own, trt_..."
            )
    return options


class _Reader:
    """Reads parameters, each a text."""

    def __init__(self, config: ModelConfig) -> None:
        self._parameters = config.parameters
        self._model = config.name

    def text(self, name: str) -> str:
        return self._parameters[name].string_value if name in self._parameters else ""

    def natural(self, name: str, most: int = (1 << 64) - 1) -> int:
        text = self.text(name) or "0"
        # More digits than any number here has take long to read.
        if not (text.isascii() and text.isdecimal() and len(text) <= 20 and int(text) <= most):
            raise self._wrong(name, text[:64], f"an integer of at least 0, at most {most}")
        return int(text)

    def boolean(self, name: str, default: bool = True) -> bool:
        """`default` where it is not given; that is ONNX Runtime's of what is asked of it."""
        text = self.text(name) or str(default)
        if text.lower() not in _BOOLEANS:
            raise self._wrong(name, text, "0 or 1")
        return _BOOLEANS[text.lower()]

    def choice(self, name: str, values: Sequence[str]) -> int:
        text = self.text(name) or values[0]
        if text not in values:
            raise self._wrong(name, text, " or ".join(values))
        return values.index(text)

    def cuda(self) -> dict[str, str]:
        options: dict[str, str] = {}
        for name, values in _CUDA_PARAMETERS.items():
            if not self.text(name):
                continue
            if values is None:
                if not self.natural(name):
                    raise self._wrong(name, self.text(name), "an integer of at least 1")
                options[name] = self.text(name)
            else:
                options[name] = values[self.choice(name, [str(number) for number in range(len(values))])]
        return options

    def fp16(self) -> Fp16 | None:
        if not self.boolean("fp16", False):
            return None
        text = self.text("fp16_tolerance") or str(ServerConfig(()).fp16_tolerance)
        try:
            tolerance = float(text)
        except ValueError:
            tolerance = 0.0
        if not 0 < tolerance < math.inf:
            raise self._wrong("fp16_tolerance", text, "numbers above 0")
        excepted = self.text("fp16_except")
        return Fp16(tolerance, tuple(name.strip() for name in excepted.split(",") if name.strip()))

    def _wrong(self, name: str, text: str, allowed: str) -> ModelConfigError:
        return ModelConfigError(
            f"model {self._model!r}: parameter {name} is {text!r}; expected values for {name} are {allowed}"
        )
