"""Model control, configuration, statistics, trace and log settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from client.calls import call
from client.scripted import ScriptedServer

from tensorferry.client import (
    BatchStatistics,
    InferenceClient,
    InvalidInput,
    Times,
)
from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos.model_config_pb2 import ModelConfig


def test_load_and_unload(server: ScriptedServer, client: InferenceClient, tmp_path: Path) -> None:
    file = tmp_path / "new.onnx"
    file.write_bytes(b"graph")
    client.load_model("row")
    assert server.servicer.request == pb.RepositoryModelLoadRequest(model_name="row")
    files: dict[str, bytes | str | Path] = {
        "1/model.onnx": file,
        "1/labels.txt": b"a\nb",
        "1/other": str(file),
    }
    client.load_model("row", config={"max_batch_size": 4}, files=files)
    sent = server.servicer.request.parameters
    assert json.loads(sent["config"].string_param) == {"max_batch_size": 4}
    assert sent["file:1/model.onnx"].bytes_param == sent["file:1/other"].bytes_param == b"graph"
    assert sent["file:1/labels.txt"].bytes_param == b"a\nb"
    client.load_model("row", config='{"backend": "onnxruntime"}')
    assert server.servicer.request.parameters["config"].string_param == '{"backend": "onnxruntime"}'
    client.unload_model("row")
    assert server.servicer.request == pb.RepositoryModelUnloadRequest(model_name="row")
    client.unload_model("row", dependents=True)
    assert server.servicer.request.parameters["unload_dependents"].bool_param


@pytest.mark.parametrize("method", ["load_model", "unload_model"])
def test_control_drops_the_models_cached_metadata(
    server: ScriptedServer, client: InferenceClient, method: str
) -> None:
    def fetched() -> int:
        for arguments in [("row",), ("row", "1"), ("text",)] * 2:
            client.metadata(*arguments)
        return server.servicer.calls.count("ModelMetadata")

    assert fetched() == 3
    call(client, method, "row")
    assert fetched() == 5


def test_configuration_is_a_dict(server: ScriptedServer, client: InferenceClient) -> None:
    config = ModelConfig(name="m", max_batch_size=8, backend="onnxruntime")
    config.input.add(name="x", dims=[-1, 3], data_type="TYPE_FP32")
    config.dynamic_batching.max_queue_delay_microseconds = 100
    config.parameters["a"].string_value = "b"
    server.servicer.config = config
    found = client.model_config("row", "2")
    assert server.servicer.request == pb.ModelConfigRequest(name="row", version="2")
    assert (found["name"], found["max_batch_size"], found["output"], found["platform"]) == ("m", 8, [], "")
    assert (found["input"][0]["data_type"], found["input"][0]["dims"]) == ("TYPE_FP32", [-1, 3])
    assert found["dynamic_batching"]["max_queue_delay_microseconds"] == 100
    assert found["parameters"] == {"a": {"string_value": "b"}}
    assert "ensemble_scheduling" not in found
    client.load_model("row", config=found)
    assert json.loads(server.servicer.request.parameters["config"].string_param) == found


def test_statistics_are_records(server: ScriptedServer, client: InferenceClient) -> None:
    message = server.servicer.statistics.model_stats.add(
        name="m", version="3", last_inference=1500, inference_count=7, execution_count=2
    )
    names = (
        "success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss",
    )  # fmt: skip
    for place, name in enumerate(names):
        times = getattr(message.inference_stats, name)
        times.count, times.ns = place, place * 10**9
    for rows in (4, 3):
        batch = message.batch_stats.add(batch_size=rows)
        batch.compute_infer.count, batch.compute_infer.ns = 2, 10**6
    server.servicer.statistics.model_stats.add(name="idle")
    one, idle = client.statistics("m", "3")
    assert server.servicer.request == pb.ModelStatisticsRequest(name="m", version="3")
    assert (one.name, one.version, one.last_inference, one.rows, one.executions) == ("m", "3", 1.5, 7, 2)
    stages = (
        one.success, one.failure, one.queue, one.compute_input, one.compute_infer, one.compute_output,
        one.cache_hit, one.cache_miss,
    )  # fmt: skip
    assert stages == tuple(Times(place, float(place)) for place in range(8))
    never = Times(0, 0.0)
    assert one.batches == tuple(BatchStatistics(rows, never, Times(2, 0.001), never) for rows in (3, 4))
    assert one.batches[0].compute_infer.mean == 0.0005
    assert (idle.last_inference, idle.success.mean) == (None, 0.0)
    client.statistics()
    assert server.servicer.request == pb.ModelStatisticsRequest()


def test_trace_settings(server: ScriptedServer, client: InferenceClient) -> None:
    assert client.trace_settings("row") == {"trace_level": ("OFF",)}
    assert server.servicer.request == pb.TraceSettingRequest(model_name="row")
    changes = {"trace_rate": 5, "trace_mode": "triton", "a": ["b", "c"], "trace_count": None}
    assert client.update_trace_settings(changes) == {
        "a": ("b", "c"), "trace_count": (), "trace_level": ("OFF",), "trace_mode": ("triton",), "trace_rate": ("5",),
    }  # fmt: skip
    sent = server.servicer.request
    assert sent.model_name == ""
    assert set(sent.settings) == set(changes)
    assert not sent.settings["trace_count"].value


def test_log_settings(server: ScriptedServer, client: InferenceClient) -> None:
    assert client.log_settings() == {"log_info": True}
    assert not server.servicer.request.settings
    changes: dict[str, bool | int | str] = {
        "log_info": False,
        "log_verbose_level": 2,
        "log_format": "default",
    }
    assert client.update_log_settings(changes) == changes
    assert set(server.servicer.request.settings) == set(changes)


WRONG: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    ("load_model", ("",), {}, "the model's name expects"),
    ("load_model", ("m",), {"config": 1}, "config expects a dict"),
    ("load_model", ("m",), {"config": {"a": object()}}, "config expects values that JSON has"),
    ("load_model", ("m",), {"files": [b""]}, "files expects a dict"),
    ("load_model", ("m",), {"files": {"1/m": 1}}, "file '1/m' expects bytes, or the path of a file, got 1"),
    ("load_model", ("m",), {"files": {"1/m": "/no/such"}}, "No such file"),
    ("unload_model", ("m",), {"dependents": 1}, "dependents expects a bool"),
    ("models", (), {"ready": "yes"}, "ready expects a bool"),
    ("model_config", (1,), {}, "the model's name expects a str"),
    ("statistics", (None,), {}, "the model's name expects a str"),
    ("statistics", ("m", 1), {}, "the model's version expects a str"),
    ("update_trace_settings", ([],), {}, "settings expects a dict"),
    ("update_trace_settings", ({"a": 1.5},), {}, "setting 'a' expects a str, an int or a list of str"),
    ("update_trace_settings", ({"a": [1]},), {}, "each value of setting 'a' expects a str"),
    ("update_log_settings", ({"a": None},), {}, "setting 'a' expects an int from 0"),
    ("update_log_settings", ("a",), {}, "settings expects a dict"),
]  # fmt: skip


def test_wrong_arguments_are_refused(server: ScriptedServer, client: InferenceClient) -> None:
    for method, arguments, options, message in WRONG:
        with pytest.raises(InvalidInput, match=message):
            call(client, method, *arguments, **options)
    assert not server.servicer.calls
