"""Options for ONNX Runtime: parsing, errors, and their effect on sessions."""

from __future__ import annotations

from pathlib import Path

import onnxruntime
import pytest
from support.models import small
from support.server.rig import fp32

from tensorferry.server.config.option_groups.devices import MOST_THREADS
from tensorferry.server.config.server_config import ServerConfig
from tensorferry.server.errors import ModelConfigError, ModelFailedError, StartError
from tensorferry.server.models.config_pbtxt.pbtxt import parse_config
from tensorferry.server.runtime.gpu.cuda_graphs import GraphOptions
from tensorferry.server.runtime.ort_options import (
    ExecutionProvider,
    Fp16,
    OrtOptions,
    parse_ort_options,
    with_server_defaults,
)
from tensorferry.server.runtime.session import Session
from tensorferry.server.system.cores import session_threads, usable_cores


def parameter(name: str, value: str) -> str:
    return f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}'


def accelerator(kind: str, name: str, **parameters: str) -> str:
    pairs = " ".join(f'parameters {{ key: "{key}" value: "{value}" }}' for key, value in parameters.items())
    return f'optimization {{ execution_accelerators {{ {kind}_execution_accelerator {{ name: "{name}" {pairs} }} }} }}'


def read(text: str) -> OrtOptions:
    return parse_ort_options(parse_config('name: "m" ' + text, "test"))


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("optimization { graph { level: -1 } }", OrtOptions(graph="ORT_ENABLE_BASIC")),
        ("optimization { graph { level: 1 } }", OrtOptions(graph="ORT_ENABLE_EXTENDED")),
        ("optimization { graph { level: 2 } }", OrtOptions(graph="ORT_DISABLE_ALL")),
        ("optimization { graph { } priority: PRIORITY_DEFAULT }", OrtOptions(graph="ORT_ENABLE_ALL")),
        ("optimization { priority: PRIORITY_MAX }", OrtOptions(kernels_first=True)),
        ("optimization { priority: PRIORITY_MIN }", OrtOptions(kernels_first=False)),
        (parameter("intra_op_thread_count", "3"), OrtOptions(intra_op_threads=3)),
        (parameter("inter_op_thread_count", "2"), OrtOptions(inter_op_threads=2)),
        (parameter("intra_op_thread_count", "0"), OrtOptions()),
        (parameter("execution_mode", "1"), OrtOptions(parallel=True)),
        (parameter("enable_mem_arena", "true"), OrtOptions()),
        (parameter("enable_mem_pattern", "False"), OrtOptions(memory_pattern=False)),
        (parameter("memory.enable_memory_arena_shrinkage", "cpu:0"), OrtOptions(arena_shrinkage="cpu:0")),
        (parameter("session.use_device_allocator_for_initializers", "1"), OrtOptions(device_allocator="1")),
        (
            parameter("cudnn_conv_algo_search", "1") + parameter("gpu_mem_limit", "1000"),
            OrtOptions(cuda=(("cudnn_conv_algo_search", "HEURISTIC"), ("gpu_mem_limit", "1000"))),
        ),
        (
            parameter("arena_extend_strategy", "1") + parameter("do_copy_in_default_stream", "0"),
            OrtOptions(
                cuda=(("arena_extend_strategy", "kSameAsRequested"), ("do_copy_in_default_stream", "0"))
            ),
        ),
        (parameter("use_tf32", "0") + parameter("fp16", "0"), OrtOptions(cuda=(("use_tf32", "0"),))),
        (
            parameter("fp16", "true")
            + parameter("fp16_tolerance", "0.5")
            + parameter("fp16_except", "Pow, /a/b"),
            OrtOptions(fp16=Fp16(0.5, ("Pow", "/a/b"))),
        ),
        (parameter("gpu_mem_limit", "1") + accelerator("gpu", "cuda", gpu_mem_limit="2"), OrtOptions(cuda=(("gpu_mem_limit", "2"),))),
        (
            accelerator(
                "gpu", "tensorrt", precision_mode="FP16", max_workspace_size_bytes="9", trt_dla_core="1"
            ),
            OrtOptions(
                gpu=(
                    ExecutionProvider(
                        "TensorrtExecutionProvider",
                        (("trt_dla_core", "1"), ("trt_fp16_enable", "1"), ("trt_max_workspace_size", "9")),
                    ),
                )
            ),
        ),
        (accelerator("gpu", "onnxruntime-ep-a", b="c"), OrtOptions(gpu=(ExecutionProvider("onnxruntime-ep-a", (("b", "c"),)),))),
        (accelerator("cpu", "onnxruntime-ep-a"), OrtOptions(cpu=(ExecutionProvider("onnxruntime-ep-a"),))),
        (accelerator("cpu", "openvino"), OrtOptions(cpu=(ExecutionProvider("OpenVINOExecutionProvider", (("device_type", "CPU"),)),))),
    ],
)  # fmt: skip
def test_options_are_read(text: str, options: OrtOptions) -> None:
    assert read(text) == options


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optimization { graph { level: 3 } }", "optimization.graph.level is 3; it must be -1"),
        (
            parameter("intra_op_thread_count", "-1"),
            "parameter intra_op_thread_count is '-1'; expected values for intra_op_thread_count are an integer of at "
            "least 0",
        ),
        *(
            (parameter("inter_op_thread_count", wrong), f"an integer of at least 0, at most {MOST_THREADS}")
            for wrong in ("4097", "9" * 5000, "٣")
        ),
        (parameter("execution_mode", "2"), "expected values for execution_mode are 0 or 1"),
        (parameter("cudnn_conv_algo_search", "3"), "expected values for cudnn_conv_algo_search are 0 or 1 or 2"),
        (accelerator("gpu", "gpu_io"), "unknown Execution Accelerator 'gpu_io' is requested as gpu_execution"),
        (accelerator("cpu", "openvino", a="b"), r"openvino has parameters \['a'\]; it takes none"),
        (accelerator("gpu", "tensorrt", precision_mode="FP8"), "unsupported precision mode 'FP8' is requested"),
        (accelerator("gpu", "tensorrt", workspace="1"), "unknown parameter 'workspace' is provided for TensorRT"),
        (parameter("gpu_mem_limit", "0"), "expected values for gpu_mem_limit are an integer of at least 1"),
        *(
            (
                parameter("fp16", "1") + parameter("fp16_tolerance", tolerance),
                f"parameter fp16_tolerance is '{tolerance}'; expected values for fp16_tolerance are numbers above 0",
            )
            for tolerance in ("0", "-1", "nan", "inf", "little")
        ),
        (accelerator("gpu", "cuda", user_compute_stream="94"), "embeds ONNX Runtime; leave it out"),
        (accelerator("gpu", "cuda", device_id="1"), "instance_group sets the device"),
        (accelerator("gpu", "cuda", enable_cuda_graph="1"), "CUDA graphs are requested by"),
        (parameter("memory.enable_memory_arena_shrinkage", "cpu:0") + parameter("enable_mem_arena", "0"), "there is no arena to shrink"),
    ],
)  # fmt: skip
def test_invalid_values_are_errors(text: str, message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        read(text)


FLAGS = ServerConfig((), cuda_memory_bytes=5, tf32=False, fp16=True, fp16_tolerance=0.123456789, threads=3)
ON_CPU = {"fp16": "1", "fp16_tolerance": "0.123456789", "intra_op_thread_count": "3"}
ALL = {"gpu_mem_limit": "5", "use_tf32": "0", **ON_CPU}


@pytest.mark.parametrize(
    ("text", "options", "devices", "parameters"),
    [
        ("", FLAGS, ["cuda:0"], ALL),
        ("", FLAGS, ["cpu"], ON_CPU),
        ("".join(map(parameter, ALL, "11111")), FLAGS, ["cuda:0"], dict.fromkeys(ALL, "1")),
        (parameter("fp16", "0") + accelerator("gpu", "cuda", use_tf32="1", gpu_mem_limit="7"), FLAGS, ["cuda:0"], {"fp16": "0", "intra_op_thread_count": "3"}),
        (parameter("fp16", "1"), ServerConfig((), fp16_tolerance=0.5), ["cpu"], {"fp16": "1", "fp16_tolerance": "0.5"}),
    ],
)  # fmt: skip
def test_flags_fill_parameters_that_the_configuration_leaves_out(
    text: str, options: ServerConfig, devices: list[str], parameters: dict[str, str]
) -> None:
    given = parse_config('name: "m" ' + text, "test")
    before = given.SerializeToString(deterministic=True)
    completed = with_server_defaults(given, options, devices)
    assert {name: value.string_value for name, value in completed.parameters.items()} == parameters
    assert given.SerializeToString(deterministic=True) == before
    assert with_server_defaults(completed, ServerConfig(()), devices) == completed


@pytest.mark.parametrize(
    ("text", "devices", "gpu", "cpu"),
    [
        ("", ["cpu"], [], ["openvino", "onnxruntime-ep-a"]),
        ("", ["cuda:0"], ["tensorrt", "onnxruntime-ep-a"], []),
        ("", ["cuda:0", "cpu"], ["tensorrt", "onnxruntime-ep-a"], ["openvino", "onnxruntime-ep-a"]),
        (accelerator("gpu", "cuda", use_tf32="1"), ["cuda:0", "cpu"], ["cuda"], []),
    ],
)
def test_providers_of_options_are_used_on_their_devices_unless_the_configuration_has_any(
    text: str, devices: list[str], gpu: list[str], cpu: list[str]
) -> None:
    given = parse_config('name: "m" ' + text, "test")
    options = ServerConfig((), providers=("tensorrt", "openvino", "onnxruntime-ep-a"))
    accelerators = with_server_defaults(given, options, devices).optimization.execution_accelerators
    assert [each.name for each in accelerators.gpu_execution_accelerator] == gpu
    assert [each.name for each in accelerators.cpu_execution_accelerator] == cpu


@pytest.mark.parametrize(
    ("text", "on_cpu", "on_gpu"),
    [
        ("", 0.0, 1e-2),
        (parameter("use_tf32", "0"), 0.0, 0.0),
        (parameter("use_tf32", "0") + parameter("fp16", "1"), 1e-2, 1e-2),
        (accelerator("cpu", "onnxruntime-ep-a") + parameter("use_tf32", "0"), 5e-2, 0.0),
        (parameter("use_tf32", "0") + accelerator("gpu", "tensorrt", precision_mode="FP16"), 0.0, 1e-2),
        (parameter("use_tf32", "0") + accelerator("gpu", "tensorrt", precision_mode="INT8"), 0.0, 5e-2),
        (accelerator("gpu", "tensorrt", trt_int8_enable="True"), 0.0, 5e-2),
        (accelerator("gpu", "cuda", use_tf32="False"), 0.0, 0.0),
    ],
)
def test_precision_of_a_device(text: str, on_cpu: float, on_gpu: float) -> None:
    options = read(text)
    assert (options.precision("cpu"), options.precision("cuda:1")) == (on_cpu, on_gpu)


def test_options_reach_onnx_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[onnxruntime.SessionOptions] = []
    real = onnxruntime.InferenceSession

    def seen(
        path: str, options: onnxruntime.SessionOptions, **others: object
    ) -> onnxruntime.InferenceSession:
        made.append(options)
        return real(path, options, **others)

    monkeypatch.setattr(onnxruntime, "InferenceSession", seen)
    wanted = OrtOptions(
        graph="ORT_ENABLE_BASIC",
        intra_op_threads=3,
        inter_op_threads=2,
        parallel=True,
        memory_arena=False,
        memory_pattern=False,
        device_allocator="1",
    )
    path = small.twice(tmp_path / "m.onnx")
    for settings, memory in ((wanted, False), (OrtOptions(), True), (OrtOptions(processes=2), True)):
        session = Session(path, "cpu", settings)
        assert session.run({"x": fp32(2, 3)})["y"].tolist() == (2 * fp32(2, 3)).tolist()
        assert (made[-1].enable_cpu_mem_arena, made[-1].enable_mem_pattern) == (memory, memory)
    options, default, of_two = made
    assert of_two.intra_op_num_threads == session_threads(usable_cores(), 2)
    assert options.graph_optimization_level == onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    assert default.graph_optimization_level == onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (3, 2)
    assert options.execution_mode == onnxruntime.ExecutionMode.ORT_PARALLEL
    assert default.execution_mode == onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    key = "session.use_device_allocator_for_initializers"
    assert options.get_session_config_entry(key) == "1"


def test_the_arena_shrinks_after_each_run(tmp_path: Path) -> None:
    """A device that does not exist shows this: it is looked up at the end of the run."""
    path = small.twice(tmp_path / "m.onnx")
    session = Session(path, "cpu", OrtOptions(arena_shrinkage="cpu:0"))
    assert session.run({"x": fp32(2, 3)})["y"].tolist() == (2 * fp32(2, 3)).tolist()
    with pytest.raises(ModelFailedError, match="arena shrink list: cpu:7"):
        Session(path, "cpu", OrtOptions(arena_shrinkage="cpu:7")).run({"x": fp32(2, 3)})


@pytest.mark.skipif(
    "OpenVINOExecutionProvider" in onnxruntime.get_available_providers(), reason="this ONNX Runtime has it"
)
def test_a_missing_provider_is_named(tmp_path: Path) -> None:
    settings = OrtOptions(cpu=(ExecutionProvider("OpenVINOExecutionProvider"),))
    with pytest.raises(
        StartError,
        match="requires OpenVINOExecutionProvider, which the installed onnxruntime does not have; it has",
    ):
        Session(small.twice(tmp_path / "m.onnx"), "cpu", settings)


def test_a_session_without_graphs_has_each_provider_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONNX Runtime keeps the providers of packages in the options, also those of the session that failed."""
    made: list[list[str]] = []

    class Options(onnxruntime.SessionOptions):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            made.append([])

        def add_provider_for_devices(self, devices: object, options: object) -> None:
            made[-1].append("package")

        def add_provider(self, name: str, options: dict[str, str]) -> None:
            made[-1].append(f"{name} {options}")

    def fails(*given: object, **options: object) -> None:
        raise RuntimeError("no graph")

    monkeypatch.setattr(onnxruntime, "SessionOptions", Options)
    monkeypatch.setattr(onnxruntime, "InferenceSession", fails)
    monkeypatch.setattr(
        onnxruntime, "get_available_providers", lambda: ["A", "CUDAExecutionProvider", "CPUExecutionProvider"]
    )
    monkeypatch.setattr("tensorferry.server.runtime.providers.provider_names", lambda package: ("A",))
    monkeypatch.setattr(
        "tensorferry.server.runtime.providers.provider_device", lambda package, device: "cuda:0"
    )
    settings = OrtOptions(gpu=(ExecutionProvider("onnxruntime-ep-a"),), graphs=GraphOptions())
    with pytest.raises(StartError, match="no graph"):
        Session(small.twice(tmp_path / "m.onnx"), "cuda:0", settings)
    assert made == [
        ["package", "CUDAExecutionProvider {'enable_cuda_graph': '1'}"],
        ["package", "CUDAExecutionProvider {}"],
    ]
