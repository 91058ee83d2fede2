"""The log names each option of a model's table that the model's configuration or its devices leave without effect."""

from __future__ import annotations

from typing import Any

import pytest

from tensorferry.server.models.config_pbtxt.pbtxt import parse_config
from tensorferry.server.models.config_pbtxt.unused_options import unused_options

XY = 'input { name: "x" data_type: TYPE_FP32 dims: 3 } output { name: "y" data_type: TYPE_FP32 dims: 3 }'


def parameter(name: str) -> str:
    return f'parameters {{ key: "{name}" value {{ string_value: "1" }} }}'


def accelerator(kind: str, name: str) -> str:
    return (
        f'optimization {{ execution_accelerators {{ {kind}_execution_accelerator {{ name: "{name}" '
        'parameters { key: "gpu_mem_limit" value: "1" } } } }'
    )


def unused(options: dict[str, Any], text: str | None, devices: list[str]) -> list[str]:
    config = parse_config(text, "test") if text is not None else None
    return [line.partition(", which has no effect: ")[0] for line in unused_options(options, config, devices)]


@pytest.mark.parametrize(
    ("field", "flag", "decisive", "others"),
    [
        ("max_batch_size", "max-batch-size", ["max_batch_size: 4", XY], ["dynamic_batching { }"]),
        (
            "max_queue_delay",
            "max-queue-delay-ms",
            ["dynamic_batching { }", XY, "max_batch_size: 1"],
            ["max_batch_size: 4"],
        ),
        ("instances", "instances", ["instance_group { }"], ["max_batch_size: 4"]),
        ("providers", "providers", [accelerator("gpu", "cuda"), accelerator("cpu", "openvino")], [""]),
        (
            "cuda_graphs",
            "cuda-graphs",
            ["optimization { cuda { graphs: true } }"],
            ["optimization { cuda { } }"],
        ),
        (
            "cuda_memory_bytes",
            "cuda-memory-bytes",
            [parameter("gpu_mem_limit"), accelerator("gpu", "cuda")],
            [accelerator("gpu", "tensorrt"), parameter("use_tf32")],
        ),
        ("slo", "slo-ms", [], ["dynamic_batching { }", XY, parameter("slo")]),
    ],
)
def test_the_configuration_decides(field: str, flag: str, decisive: list[str], others: list[str]) -> None:
    options = {field: ("tensorrt",) if field == "providers" else 1}
    for text in decisive:
        assert unused(options, text, ["cuda:0"]) == [flag]
    for other in (*others, "", None):
        assert unused(options, other, ["cuda:0"]) == []


def test_options_of_gpus_have_no_effect_on_the_cpu() -> None:
    options = {"tf32": False, "cuda_graphs": (1,), "max_batch_size": 4, "providers": ("tensorrt", "openvino")}
    assert unused(options, None, ["cpu"]) == ["tf32", "cuda-graphs", "the provider tensorrt"]
    assert unused(options, None, ["cuda:0"]) == ["the provider openvino"]
    assert unused(options, None, ["cpu", "cuda:0"]) == []
