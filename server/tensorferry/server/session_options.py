"""How a configuration tunes ONNX Runtime: by the names and values that Triton's backend for it reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tensorferry.protos.model_config_pb2 import ModelConfig, ModelOptimizationPolicy
from tensorferry.server.ladder import GraphOptions, GraphSpec
from tensorferry.server.model_config import ModelConfigError

# By optimization.graph.level.
_GRAPH_LEVELS = {-1: "basic", 0: "all", 1: "extended", 2: "none"}
_BOOLEANS = {"0": False, "false": False, "1": True, "true": True}

ARENA_SHRINKAGE = "memory.enable_memory_arena_shrinkage"
DEVICE_ALLOCATOR = "session.use_device_allocator_for_initializers"
# Options of the CUDA provider that may stand among the parameters, the older way.
_CUDA_PARAMETERS: Mapping[str, Sequence[str] | None] = {
    "cudnn_conv_algo_search": ("EXHAUSTIVE", "HEURISTIC", "DEFAULT"),
    "gpu_mem_limit": None,
    "arena_extend_strategy": ("kNextPowerOfTwo", "kSameAsRequested"),
    "do_copy_in_default_stream": None,
}
_PARAMETERS = (
    "intra_op_thread_count",
    "inter_op_thread_count",
    "execution_mode",
    "enable_mem_arena",
    "enable_mem_pattern",
    ARENA_SHRINKAGE,
    DEVICE_ALLOCATOR,
    *_CUDA_PARAMETERS,
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
# Set by the server where graphs are wanted: each is captured by it, for batches of one size.
_GRAPH_OPTIONS = ("enable_cuda_graph", "trt_cuda_graph_enable")


@dataclass(frozen=True, slots=True)
class Provider:
    """An execution provider of ONNX Runtime, by its name there, and its options."""

    name: str
    options: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """What a session is made with; 0 threads are ONNX Runtime's own choice.

    `graph` is what the graph optimizer does: all, extended, basic or none. `gpu` are the providers of a session
    on a GPU before the CUDA provider, whose options are `cuda`; `cpu` those of one on the CPU. `graphs` are the
    CUDA graphs of one on a GPU.
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
    gpu: tuple[Provider, ...] = ()
    cpu: tuple[Provider, ...] = ()
    graphs: GraphOptions | None = None


def unknown_parameters(config: ModelConfig) -> Sequence[str]:
    """The parameters that nothing here reads."""
    return sorted(key for key in config.parameters if key not in _PARAMETERS)


def session_options_of(config: ModelConfig) -> SessionOptions:
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
            providers.append(Provider("TensorrtExecutionProvider", tuple(sorted(options.items()))))
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
    return SessionOptions(
        graph=_GRAPH_LEVELS[level],
        intra_op_threads=read.natural("intra_op_thread_count"),
        inter_op_threads=read.natural("inter_op_thread_count"),
        parallel=bool(read.choice("execution_mode", ("0", "1"))),
        memory_arena=read.boolean("enable_mem_arena"),
        memory_pattern=read.boolean("enable_mem_pattern"),
        arena_shrinkage=read.text(ARENA_SHRINKAGE),
        device_allocator=read.text(DEVICE_ALLOCATOR),
        cuda=tuple(sorted(cuda.items())),
        gpu=tuple(providers),
        cpu=tuple(
            Provider("OpenVINOExecutionProvider", (("device_type", "CPU"),))
            for _ in accelerators.cpu_execution_accelerator
        ),
        graphs=_graphs(config),
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

    def natural(self, name: str) -> int:
        text = self.text(name) or "0"
        if not text.isdecimal():
            raise self._wrong(name, text, "an integer of at least 0")
        return int(text)

    def boolean(self, name: str) -> bool:
        """True where it is not given, as is ONNX Runtime's default of what is asked here."""
        text = self.text(name) or "1"
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
                options[name] = self.text(name)
            else:
                options[name] = values[self.choice(name, [str(number) for number in range(len(values))])]
        return options

    def _wrong(self, name: str, text: str, allowed: str) -> ModelConfigError:
        return ModelConfigError(
            f"model {self._model!r}: parameter {name} is {text!r}; expected values for {name} are {allowed}"
        )
