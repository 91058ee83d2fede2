"""Options for ONNX Runtime from config.pbtxt and flags, by the names and values of Triton's ONNX Runtime backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tensorferry.protos.model_config_pb2 import ModelConfig, ModelOptimizationPolicy
from tensorferry.server.config.option_groups.devices import MOST_THREADS
from tensorferry.server.config.parsers import positive_number
from tensorferry.server.config.server_config import ServerConfig
from tensorferry.server.errors import ModelConfigError
from tensorferry.server.runtime.checks.sampling import TOLERANCE
from tensorferry.server.runtime.files.op_libraries import OpLibrary
from tensorferry.server.runtime.gpu.cuda_graphs import GraphOptions, GraphSpec, requested_graphs
from tensorferry.server.runtime.provider_packages import is_package

if TYPE_CHECKING:
    from tensorferry.server.onnx.graph.rewriting.changes import FreedRows

TENSORRT = "TensorrtExecutionProvider"

# ONNX Runtime's names of the values of optimization.graph.level.
_GRAPH_LEVELS = {-1: "ORT_ENABLE_BASIC", 0: "ORT_ENABLE_ALL", 1: "ORT_ENABLE_EXTENDED", 2: "ORT_DISABLE_ALL"}
_BOOLEANS = {"0": False, "false": False, "1": True, "true": True}

# Parameter that overrides --batching for a model. `onnx.batching` reads it.
BATCHING = "batching"
ARENA_SHRINKAGE = "memory.enable_memory_arena_shrinkage"
DEVICE_ALLOCATOR = "session.use_device_allocator_for_initializers"
# Options of the CUDA provider that Triton also accepts as parameters. The index of a value is ONNX Runtime's number for it.
_CUDA_PARAMETERS: Mapping[str, Sequence[str] | None] = {
    "cudnn_conv_algo_search": ("EXHAUSTIVE", "HEURISTIC", "DEFAULT"),
    "gpu_mem_limit": None,
    "arena_extend_strategy": ("kNextPowerOfTwo", "kSameAsRequested"),
    "do_copy_in_default_stream": ("0", "1"),
    "use_tf32": ("0", "1"),
}
# Options that an execution accelerator must not set. ONNX Runtime would call the addresses among them.
_REFUSED = {
    "device_id": "instance_group sets the device",
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
        "it is an address in the memory of a program that embeds ONNX Runtime",
    ),
}
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
    "fp16",
    "fp16_tolerance",
    "fp16_except",
)

# Triton's names for TensorRT's options. All others have ONNX Runtime's names, `trt_...`.
_TENSORRT_NAMES = {
    "max_workspace_size_bytes": "trt_max_workspace_size",
    "int8_calibration_table_name": "trt_int8_calibration_table_name",
    "int8_use_native_calibration_table": "trt_int8_use_native_calibration_table",
}
_PRECISIONS = ("FP32", "FP16", "BF16", "INT8")
# Set by the server itself, because it captures each graph for one batch shape.
_GRAPH_OPTIONS = ("enable_cuda_graph", "trt_cuda_graph_enable")
# Whether the kernels of a model come first.
_PRIORITIES = {ModelOptimizationPolicy.PRIORITY_MAX: True, ModelOptimizationPolicy.PRIORITY_MIN: False}


@dataclass(frozen=True, slots=True)
class ExecutionProvider:
    """ONNX Runtime execution provider, or a package with some: its name and its options."""

    name: str
    options: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Fp16:
    """Conversion of a model to FP16. Operators and nodes named in `excepted` stay in FP32.

    `tolerance` is the allowed difference of an output, relative to its greatest magnitude.
    """

    tolerance: float
    excepted: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OrtOptions:
    """Options of a session. With 0 threads, the number is that of the cores and `processes`, or ONNX Runtime's choice.

    `processes` is the number of server processes, which share the cores.
    `graph` is ONNX Runtime's name of the level of graph optimization. `cuda` holds the CUDA provider's options.
    `gpu` lists the providers that come before the CUDA provider on a GPU, `cpu` those before the CPU provider on the
    CPU. `graphs` and `kernels_first` apply to sessions on GPUs: a model's kernels start before or after those of other models,
    or None for neither. `op_libraries` have custom operators. `freed` are changes of the graph that make a first axis of 1
    variable.
    """

    graph: str = _GRAPH_LEVELS[0]
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
    kernels_first: bool | None = None
    processes: int = 1
    op_libraries: tuple[OpLibrary, ...] = ()
    freed: FreedRows | None = None

    def precision(self, device: str) -> float:
        """Return the precision of FP32 outputs on a device, relative to the output's greatest magnitude.

        It is the batching check's tolerance for FP16 where the device computes with 11 bits of mantissa, for BF16 where
        with 8.
        """
        if any(is_package(provider.name) for provider in (self.cpu if device == "cpu" else self.gpu)):
            # Such as OpenVINO, which computes in BF16 on CPUs that can.
            return TOLERANCE["BF16"]
        if device != "cpu":
            given = {name: value for provider in self.gpu for name, value in provider.options}
            # Values that are no booleans fail the session.
            chosen = {
                name: _BOOLEANS.get(value.lower()) for name, value in {**given, **dict(self.cuda)}.items()
            }
            if chosen.get("trt_bf16_enable") or chosen.get("trt_int8_enable"):
                return TOLERANCE["BF16"]
            if chosen.get("trt_fp16_enable") or chosen.get("use_tf32", True):
                return TOLERANCE["FP16"]
        return TOLERANCE["FP16"] if self.fp16 is not None else 0.0


def with_server_defaults(
    config: ModelConfig, server_config: ServerConfig, devices: Sequence[str]
) -> ModelConfig:
    """Return a copy with the server's options as parameters, unless the configuration sets them itself."""
    completed = ModelConfig()
    completed.CopyFrom(config)
    defaults = ServerConfig(())
    given: dict[str, str] = {}
    if set(devices) - {"cpu"}:
        if server_config.cuda_memory_bytes is not None:
            given["gpu_mem_limit"] = str(server_config.cuda_memory_bytes)
        if server_config.tf32 != defaults.tf32:
            given["use_tf32"] = str(int(server_config.tf32))
    for accelerator in config.optimization.execution_accelerators.gpu_execution_accelerator:
        if accelerator.name == "cuda":
            for name in accelerator.parameters:
                given.pop(name, None)
    if server_config.threads:
        given["intra_op_thread_count"] = str(server_config.threads)
    if _Reader(config).boolean("fp16", server_config.fp16):
        given["fp16"] = "1"
        if server_config.fp16_tolerance != defaults.fp16_tolerance:
            given["fp16_tolerance"] = str(server_config.fp16_tolerance)
    for name, value in given.items():
        if name not in completed.parameters:
            completed.parameters[name].string_value = value
    if not has_providers(config):
        accelerators = completed.optimization.execution_accelerators
        for name in server_config.providers:
            if runs_on_cpu(name) and "cpu" in devices:
                accelerators.cpu_execution_accelerator.add(name=name)
            if runs_on_gpu(name) and set(devices) - {"cpu"}:
                accelerators.gpu_execution_accelerator.add(name=name)
    return completed


def has_providers(config: ModelConfig) -> bool:
    """Return whether a configuration has execution providers of its own."""
    accelerators = config.optimization.execution_accelerators
    return bool(accelerators.gpu_execution_accelerator or accelerators.cpu_execution_accelerator)


def runs_on_cpu(name: str) -> bool:
    """Return whether a provider of the option `providers` can run sessions of the device cpu."""
    return name == "openvino" or is_package(name)


def runs_on_gpu(name: str) -> bool:
    """Return whether a provider of the option `providers` can run sessions of GPUs."""
    return name != "openvino"


def unknown_parameters(config: ModelConfig) -> Sequence[str]:
    """Return the names of parameters that have no effect."""
    return sorted(key for key in config.parameters if key not in _PARAMETERS)


def ort_options_for(config: ModelConfig, server_config: ServerConfig, name: str) -> OrtOptions:
    """Return the options for a model called `name`: its configuration's, else CUDA graphs and caches of the server.

    ModelConfigError names a value that is not allowed.
    """
    own = parse_ort_options(config)
    graphs, gpu = own.graphs, own.gpu
    if graphs is None and server_config.cuda_graphs is not None:
        graphs = GraphOptions(tuple(map(GraphSpec, sorted(set(server_config.cuda_graphs)))))
    if server_config.tensorrt_cache is not None:
        # Because TensorRT builds an engine for minutes.
        folder = str(server_config.tensorrt_cache / name)
        cache = {
            "trt_engine_cache_enable": "1",
            "trt_engine_cache_path": folder,
            "trt_timing_cache_enable": "1",
            "trt_timing_cache_path": folder,
        }
        gpu = tuple(
            _provider(TENSORRT, {**cache, **dict(each.options)}) if each.name == TENSORRT else each
            for each in gpu
        )
    return replace(own, graphs=graphs, processes=server_config.processes or 1, gpu=gpu)


def parse_ort_options(config: ModelConfig) -> OrtOptions:
    """Return the options in a configuration. ModelConfigError names a value that is not allowed."""
    read = _Reader(config)
    accelerators = config.optimization.execution_accelerators
    cuda = read.cuda()
    gpu, cpu = [], []
    for accelerator in accelerators.gpu_execution_accelerator:
        if accelerator.name == "cuda":
            cuda.update(accelerator.parameters)
        else:
            gpu.append(_accelerator("gpu", accelerator.name, accelerator.parameters, config.name))
    for accelerator in accelerators.cpu_execution_accelerator:
        cpu.append(_accelerator("cpu", accelerator.name, accelerator.parameters, config.name))
    for name, value in [*cuda.items(), *(option for provider in gpu for option in provider.options)]:
        if name in _REFUSED:
            raise ModelConfigError(
                f"model {config.name!r} has {name} {value!r} for an execution accelerator: {_REFUSED[name]}; leave it out"
            )
        if name in _GRAPH_OPTIONS and _BOOLEANS.get(value.lower()) is not False:
            raise ModelConfigError(
                f"model {config.name!r} has {name} {value!r}: leave it out; CUDA graphs are requested by "
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
        intra_op_threads=read.natural("intra_op_thread_count", MOST_THREADS),
        inter_op_threads=read.natural("inter_op_thread_count", MOST_THREADS),
        parallel=bool(read.choice("execution_mode", ("0", "1"))),
        memory_arena=read.boolean("enable_mem_arena"),
        memory_pattern=read.boolean("enable_mem_pattern"),
        arena_shrinkage=read.text(ARENA_SHRINKAGE),
        device_allocator=read.text(DEVICE_ALLOCATOR),
        cuda=tuple(sorted(cuda.items())),
        gpu=tuple(gpu),
        cpu=tuple(cpu),
        fp16=read.fp16(),
        graphs=requested_graphs(config),
        kernels_first=_PRIORITIES.get(config.optimization.priority),
    )


def _provider(name: str, options: Mapping[str, str]) -> ExecutionProvider:
    return ExecutionProvider(name, tuple(sorted(options.items())))


def _accelerator(kind: str, name: str, parameters: Mapping[str, str], model: str) -> ExecutionProvider:
    """Return the provider that an execution accelerator of the kind `gpu` or `cpu` requests."""
    if is_package(name):
        return _provider(name, parameters)
    if (kind, name) == ("gpu", "tensorrt"):
        return _provider(TENSORRT, _tensorrt(parameters, model))
    if (kind, name) != ("cpu", "openvino"):
        known = "tensorrt and cuda" if kind == "gpu" else "openvino"
        raise ModelConfigError(
            f"model {model!r}: unknown Execution Accelerator {name!r} is requested as {kind}_execution_accelerator; known "
            f"are {known}, and packages such as onnxruntime-ep-openvino"
        )
    if parameters:
        raise ModelConfigError(
            f"model {model!r}: cpu_execution_accelerator openvino has parameters {sorted(parameters)}; it takes none"
        )
    return _provider("OpenVINOExecutionProvider", {"device_type": "CPU"})


def _tensorrt(parameters: Mapping[str, str], model: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for name, value in parameters.items():
        if name == "precision_mode":
            if value not in _PRECISIONS:
                raise ModelConfigError(
                    f"model {model!r}: unsupported precision mode {value!r} is requested; it must be one of "
                    f"{', '.join(_PRECISIONS)}"
                )
            if value != "FP32":
                options[f"trt_{value.lower()}_enable"] = "1"
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
    """Reader of a configuration's parameters, which are strings."""

    def __init__(self, config: ModelConfig) -> None:
        self._parameters = config.parameters
        self._model = config.name

    def text(self, name: str) -> str:
        return self._parameters[name].string_value if name in self._parameters else ""

    def natural(self, name: str, most: int = (1 << 64) - 1) -> int:
        text = self.text(name) or "0"
        # Converting a number with very many digits takes long, and no valid number has more than 20.
        if not (text.isascii() and text.isdecimal() and len(text) <= 20 and int(text) <= most):
            raise self._wrong(name, text[:64], f"an integer of at least 0, at most {most}")
        return int(text)

    def boolean(self, name: str, default: bool = True) -> bool:
        """Return a parameter, or `default` (ONNX Runtime's own) if it is missing."""
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
            tolerance = positive_number.parse(text)
        except ValueError:
            raise self._wrong("fp16_tolerance", text, "numbers above 0") from None
        excepted = self.text("fp16_except")
        return Fp16(tolerance, tuple(name.strip() for name in excepted.split(",") if name.strip()))

    def _wrong(self, name: str, text: str, allowed: str) -> ModelConfigError:
        return ModelConfigError(
            f"model {self._model!r}: parameter {name} is {text!r}; expected values for {name} are {allowed}"
        )


def has_gpu_options(config: ModelConfig) -> bool:
    """Return whether a configuration has options that apply to instances on GPUs only."""
    optimization = config.optimization
    return bool(
        optimization.execution_accelerators.gpu_execution_accelerator
        or optimization.cuda.graphs
        or optimization.priority in _PRIORITIES
        or any(name in config.parameters for name in _CUDA_PARAMETERS)
    )
