"""Model control, configuration, statistics, trace and log settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import pytest
from client.either import Client, call
from client.scripted import ScriptedServer

from tensorferry.client import (
    BatchStatistics,
    FailedPrecondition,
    InvalidInput,
    NotFound,
    PermissionDenied,
    Times,
    Unimplemented,
)
from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos.model_config_pb2 import ModelConfig


async def test_load_and_unload(server: ScriptedServer, either: Client, tmp_path: Path) -> None:
    file = tmp_path / "new.onnx"
    file.write_bytes(b"graph")
    assert await call(either, "load_model", "row") is None
    assert server.servicer.request == pb.RepositoryModelLoadRequest(model_name="row")
    files = {"1/model.onnx": file, "1/labels.txt": b"a\nb", "1/other": str(file)}
    await call(either, "load_model", "row", config={"max_batch_size": 4}, files=files)
    sent = server.servicer.request.parameters
    assert json.loads(sent["config"].string_param) == {"max_batch_size": 4}
    assert sent["file:1/model.onnx"].bytes_param == sent["file:1/other"].bytes_param == b"graph"
    assert sent["file:1/labels.txt"].bytes_param == b"a\nb"
    await call(either, "load_model", "row", config='{"backend": "onnxruntime"}')
    assert server.servicer.request.parameters["config"].string_param == '{"backend": "onnxruntime"}'
    await call(either, "unload_model", "row")
    assert server.servicer.request == pb.RepositoryModelUnloadRequest(model_name="row")
    await call(either, "unload_model", "row", dependents=True)
    assert server.servicer.request.parameters["unload_dependents"].bool_param


@pytest.mark.parametrize("method", ["load_model", "unload_model"])
async def test_control_drops_the_models_cached_metadata(
    server: ScriptedServer, either: Client, method: str
) -> None:
    for _ in range(2):
        await call(either, "metadata", "row")
        await call(either, "metadata", "row", "1")
        await call(either, "metadata", "text")
    assert server.servicer.calls.count("ModelMetadata") == 3
    await call(either, method, "row")
    for _ in range(2):
        await call(either, "metadata", "row")
        await call(either, "metadata", "row", "1")
        await call(either, "metadata", "text")
    assert server.servicer.calls.count("ModelMetadata") == 5


async def test_models_that_are_ready(server: ScriptedServer, either: Client) -> None:
    await call(either, "models", ready=True)
    assert server.servicer.request.ready
    await call(either, "models")
    assert not server.servicer.request.ready


async def test_configuration_is_a_dict(server: ScriptedServer, either: Client) -> None:
    config = ModelConfig(name="m", max_batch_size=8, backend="onnxruntime")
    config.input.add(name="x", dims=[-1, 3], data_type="TYPE_FP32")
    config.dynamic_batching.max_queue_delay_microseconds = 100
    config.parameters["a"].string_value = "b"
    server.servicer.config = config
    found = await call(either, "model_config", "row", "2")
    assert server.servicer.request == pb.ModelConfigRequest(name="row", version="2")
    assert found["name"] == "m"
    assert found["max_batch_size"] == 8
    assert found["input"][0]["data_type"] == "TYPE_FP32"
    assert found["input"][0]["dims"] == [-1, 3]
    assert found["dynamic_batching"]["max_queue_delay_microseconds"] == 100
    assert found["parameters"] == {"a": {"string_value": "b"}}
    assert found["output"] == []
    assert found["platform"] == ""
    assert "ensemble_scheduling" not in found
    await call(either, "load_model", "row", config=found)
    assert json.loads(server.servicer.request.parameters["config"].string_param) == found


async def test_statistics_are_records(server: ScriptedServer, either: Client) -> None:
    message = server.servicer.statistics.model_stats.add(
        name="m", version="3", last_inference=1500, inference_count=7, execution_count=2
    )
    for place, name in enumerate(
        (
            "success",
            "fail",
            "queue",
            "compute_input",
            "compute_infer",
            "compute_output",
            "cache_hit",
            "cache_miss",
        )
    ):
        times = getattr(message.inference_stats, name)
        times.count, times.ns = place, place * 10**9
    for rows in (4, 3):
        batch = message.batch_stats.add(batch_size=rows)
        batch.compute_infer.count, batch.compute_infer.ns = 2, 10**6
    server.servicer.statistics.model_stats.add(name="idle")
    one, idle = await call(either, "statistics", "m", "3")
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
    await call(either, "statistics")
    assert server.servicer.request == pb.ModelStatisticsRequest()


async def test_trace_settings(server: ScriptedServer, either: Client) -> None:
    assert await call(either, "trace_settings", "row") == {"trace_level": ("OFF",)}
    assert server.servicer.request == pb.TraceSettingRequest(model_name="row")
    changes = {"trace_rate": 5, "trace_mode": "triton", "a": ["b", "c"], "trace_count": None}
    assert await call(either, "update_trace_settings", changes) == {
        "a": ("b", "c"), "trace_count": (), "trace_level": ("OFF",), "trace_mode": ("triton",), "trace_rate": ("5",),
    }  # fmt: skip
    sent = server.servicer.request
    assert sent.model_name == ""
    assert set(sent.settings) == set(changes)
    assert not sent.settings["trace_count"].value


async def test_log_settings(server: ScriptedServer, either: Client) -> None:
    assert await call(either, "log_settings") == {"log_info": True}
    assert not server.servicer.request.settings
    changes = {"log_info": False, "log_verbose_level": 2, "log_format": "default"}
    assert await call(either, "update_log_settings", changes) == changes
    assert set(server.servicer.request.settings) == set(changes)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.NOT_FOUND, NotFound),
        (grpc.StatusCode.PERMISSION_DENIED, PermissionDenied),
        (grpc.StatusCode.UNIMPLEMENTED, Unimplemented),
        (grpc.StatusCode.FAILED_PRECONDITION, FailedPrecondition),
    ],
)
@pytest.mark.parametrize(
    "method",
    ["load_model", "unload_model", "model_config", "statistics", "trace_settings"],
)
async def test_errors_are_those_of_other_calls(
    server: ScriptedServer, either: Client, method: str, code: grpc.StatusCode, kind: type[Exception]
) -> None:
    server.servicer.failures = [code]
    with pytest.raises(kind, match="scripted failure"):
        await call(either, method, "row")


@pytest.mark.parametrize(
    ("method", "arguments", "options", "message"),
    [
        ("load_model", ("",), {}, "the model's name expects"),
        ("load_model", ("m",), {"config": 1}, "config expects a dict"),
        ("load_model", ("m",), {"config": {"a": object()}}, "config expects values that JSON has"),
        ("load_model", ("m",), {"files": [b""]}, "files expects a dict"),
        (
            "load_model",
            ("m",),
            {"files": {"1/m": 1}},
            "file '1/m' expects bytes, or the path of a file, got 1",
        ),
        ("load_model", ("m",), {"files": {"1/m": "/no/such"}}, "No such file"),
        ("unload_model", ("m",), {"dependents": 1}, "dependents expects a bool"),
        ("models", (), {"ready": "yes"}, "ready expects a bool"),
        ("model_config", (1,), {}, "the model's name expects a str"),
        ("statistics", (None,), {}, "the model's name expects a str"),
        ("statistics", ("m", 1), {}, "the model's version expects a str"),
        ("update_trace_settings", ([],), {}, "settings expects a dict"),
        ("update_trace_settings", ({"a": 1.5},), {}, "setting 'a' expects a str, an int or a list of str"),
        ("update_trace_settings", ({"a": [1]},), {}, "each value of setting 'a' expects a str"),
        ("update_log_settings", ({"a": 1.5},), {}, "setting 'a' expects an int from 0"),
        ("update_log_settings", ({"a": None},), {}, "setting 'a' expects an int from 0"),
        ("update_log_settings", ("a",), {}, "settings expects a dict"),
    ],
)
async def test_wrong_arguments_are_refused(
    server: ScriptedServer,
    either: Client,
    method: str,
    arguments: tuple[Any, ...],
    options: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(InvalidInput, match=message):
        await call(either, method, *arguments, **options)
    assert not server.servicer.calls
