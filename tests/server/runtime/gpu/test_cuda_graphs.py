"""CUDA graphs from options to batches that run captured, with the CPU as the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.models import small
from support.server.rig import Load

from tensorferry.server.config.option_groups.batching import PadLengths
from tensorferry.server.config.server_config import ServerConfig
from tensorferry.server.errors import ModelConfigError, StartError
from tensorferry.server.models.config_pbtxt.pbtxt import parse_config
from tensorferry.server.runtime.gpu.cuda_graphs import GraphOptions, GraphSpec, shapes_to_capture
from tensorferry.server.runtime.ort_options import (
    ExecutionProvider,
    OrtOptions,
    ort_options_for,
    parse_ort_options,
)
from tensorferry.server.runtime.session import Session

pytestmark = pytest.mark.usefixtures("on_device")


@pytest.fixture
def graphs_run(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Number of the graph of each run, or None."""
    seen: list[int | None] = []
    run = Session._run_bound

    def recorded(self: Session, binding: Any, graph: int | None) -> None:
        seen.append(graph)
        run(self, binding, graph)

    monkeypatch.setattr(Session, "_run_bound", recorded)
    return seen


def test_each_size_up_to_max_batch_size_of_each_padded_length_runs_captured(
    load: Load, graphs_run: list[int | None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    model = load(
        small.masked_mean,
        max_batch_size=6,
        cuda_graphs=(),
        pad_lengths=PadLengths("sequence", (8, 16)),
        pad_values=(("ids", "0"), ("mask", "0")),
    )
    assert "padded along 'sequence' to 8, 16" in model.batching
    assert "model m: CUDA graphs for batches of 1, 2, 4, 6" in caplog.text
    graphs_run.clear()
    for length in (8, 16):
        for rows in (1, 2, 3, 4, 5, 6, 3):
            ids = np.arange(rows * length).reshape(rows, length)
            answer = model.batcher.submit_rows({"ids": ids, "mask": np.ones_like(ids)}).result(30)
            assert answer["tokens"].shape == (rows, length, 4)
    assert None not in graphs_run
    assert len(set(graphs_run)) >= 8, "of 4 sizes and 2 lengths, in one of two slots"


def test_a_model_whose_shapes_vary_is_served_without_graphs(
    load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    model = load(small.masked_mean, max_batch_size=2, cuda_graphs=())
    (line,) = [
        record.getMessage() for record in caplog.records if "without CUDA graphs" in record.getMessage()
    ]
    assert "input 'ids' has dimensions that vary, [-1, -1]: name those of each graph" in line
    ids = np.arange(5)[None]
    assert model.batcher.submit_rows({"ids": ids, "mask": np.ones_like(ids)}).result(30)["tokens"].shape == (
        1,
        5,
        4,
    )


def test_a_configuration_that_requires_impossible_graphs_is_an_error(load: Load) -> None:
    with pytest.raises(
        StartError, match=r"m\.onnx: its configuration requires CUDA graphs .*'at' is only known"
    ):
        load(
            small.found,
            "optimization { cuda { graphs: true graph_spec { input { key: 'x' value { dim: [2, 3] } } } } }",
        )


# Options.


def captured(text: str, path: Path, most: int, lengths: Any = ({},)) -> list[Any]:
    options = parse_ort_options(parse_config('name: "m" ' + text, "test")).graphs
    assert options is not None
    return [
        tuple(shapes.values())
        for shapes in shapes_to_capture(options, Session(path).signature, most, list(lengths))
    ]


def test_shapes_to_capture(tmp_path: Path) -> None:
    fixed, ragged = small.twice(tmp_path / "f.onnx"), small.added(tmp_path / "r.onnx")
    on = "optimization { cuda { graphs: true %s } }"
    assert captured(on % "", fixed, 5) == [((1, 3),), ((2, 3),), ((4, 3),), ((5, 3),)]
    assert captured(on % "graph_spec { batch_size: 4 } graph_spec { batch_size: 2 }", fixed, 8) == [
        ((2, 3),),
        ((4, 3),),
    ]
    spec = 'graph_spec { batch_size: 2 input { key: "%s" value { dim: 7 } } input { key: "b" value { dim: 7 } } }'
    assert captured(on % (spec % "a"), ragged, 2) == [((2, 7), (2, 7))]
    assert captured(on % "", ragged, 1, [{"n": 4}, {"n": 8}]) == [((1, 4), (1, 4)), ((1, 8), (1, 8))]
    for wrong, message in (
        ("graph_spec { batch_size: 9 }", r"batch_size 9; max_batch_size is 8: it must be from 1 to 8"),
        ("graph_spec { }", r"batch_size 0; max_batch_size is 8"),
        (
            'graph_spec { batch_size: 1 input { key: "z" value { dim: 3 } } }',
            r"inputs \['z'\]; the model's are x",
        ),
        (
            'graph_spec { batch_size: 1 input { key: "x" value { dim: 4 } } }',
            r"'x' the shape \[4\]; the model takes \[3\]",
        ),
    ):
        with pytest.raises(StartError, match=message):
            captured(on % wrong, fixed, 8)
    with pytest.raises(StartError, match="max_batch_size is 0: it must be left out"):
        captured(on % "graph_spec { batch_size: 1 }", fixed, 0)
    assert captured(on % 'graph_spec { input { key: "x" value { dim: [2, 3] } } }', fixed, 0) == [((2, 3),)]


@pytest.mark.parametrize("spec", ["batch_size: -1", 'batch_size: 1 input { key: "x" value { dim: -1 } }'])
def test_sizes_below_one_are_refused(spec: str) -> None:
    with pytest.raises(ModelConfigError, match="sizes must be at least 1"):
        parse_ort_options(
            parse_config(f"optimization {{ cuda {{ graphs: true graph_spec {{ {spec} }} }} }}", "test")
        )


# The server's own options.


def config(**options: Any) -> ServerConfig:
    return ServerConfig((), **options)


def test_a_models_configuration_has_precedence_over_the_flag() -> None:
    own = parse_config("optimization { cuda { graphs: true graph_spec { batch_size: 3 } } }", "test")
    plain = parse_config("", "test")
    assert ort_options_for(own, config(cuda_graphs=()), "m").graphs == GraphOptions(
        (GraphSpec(3),), required=True
    )
    assert ort_options_for(plain, config(cuda_graphs=(8, 1, 8)), "m").graphs == GraphOptions(
        (GraphSpec(1), GraphSpec(8))
    )
    assert ort_options_for(plain, config(), "m").graphs is None


def test_tensorrt_caches_its_engines(tmp_path: Path) -> None:
    own = parse_config(
        'optimization { execution_accelerators { gpu_execution_accelerator { name: "tensorrt" '
        'parameters { key: "trt_timing_cache_path" value: "own" } } } }',
        "test",
    )
    assert ort_options_for(own, config(), "m") == parse_ort_options(own)
    (tensorrt,) = ort_options_for(own, config(tensorrt_cache=tmp_path), "m").gpu
    assert dict(tensorrt.options) == {
        "trt_engine_cache_enable": "1",
        "trt_engine_cache_path": str(tmp_path / "m"),
        "trt_timing_cache_enable": "1",
        "trt_timing_cache_path": "own",
    }


def test_tensorrt_is_not_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Enough to choose the providers; loading then fails.
    monkeypatch.setattr(
        "onnxruntime.get_available_providers",
        lambda: ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"],
    )
    settings = OrtOptions(gpu=(ExecutionProvider("TensorrtExecutionProvider"),), graphs=GraphOptions())
    with pytest.raises(StartError):
        Session(small.twice(tmp_path / "m.onnx"), "cuda:0", settings)
    assert "is served without CUDA graphs: TensorRT captures one graph alone" in caplog.text
