"""tritonclient enables traces, and Triton's tools can read the file of a real server."""

from __future__ import annotations

import json
import queue
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from e2e.fixtures import Serve
from support.wire.inputs import probe
from tritonclient.utils import InferenceServerException

RAN = [
    "GRPC_WAITREAD_START",
    "GRPC_WAITREAD_END",
    "REQUEST_START",
    "QUEUE_START",
    "COMPUTE_START",
    "COMPUTE_INPUT_END",
    "COMPUTE_OUTPUT_START",
    "COMPUTE_END",
    "REQUEST_END",
]
AT_FIRST = {
    "trace_level": ["OFF"],
    "trace_rate": ["1000"],
    "trace_count": ["-1"],
    "log_frequency": ["0"],
    "trace_mode": ["triton"],
}


def settings(
    client: triton.InferenceServerClient, model: str | None = None, **changes: Any
) -> dict[str, Any]:
    """Return all settings but the file, after the given changes."""
    if changes:
        answer = client.update_trace_settings(model, changes, as_json=True)
    else:
        answer = client.get_trace_settings(model, as_json=True)
    values = {name: value.get("value") for name, value in answer["settings"].items()}
    del values["trace_file"]
    return values


def read(path: Path) -> list[dict[str, Any]]:
    traces: list[dict[str, Any]] = json.loads(path.read_text())
    for trace in traces:
        times = [time["ns"] for time in trace["timestamps"]]
        assert times == sorted(times), trace
    return traces


def names(trace: dict[str, Any]) -> list[str]:
    return [time["name"] for time in trace["timestamps"]]


def test_a_request_in_two_is_traced_with_its_times(serve: Serve, probe_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "traces.json"
    server = serve(probe_model, "--trace-file", path)
    with triton.InferenceServerClient(server.address) as client:
        assert settings(client) == settings(client, "probe") == AT_FIRST
        assert client.get_trace_settings(as_json=True)["settings"]["trace_file"] == {"value": [str(path)]}
        assert "trace" in client.get_server_metadata().extensions
        client.infer("probe", probe(), request_id="before")
        changes: dict[str, Any] = {"trace_level": ["TIMESTAMPS"], "trace_rate": ["2"]}
        assert settings(client, **changes) == AT_FIRST | changes
        for tag in range(1, 7):
            client.infer("probe", probe(work=3), request_id=str(tag))
        # A request that fails in the model, and one that is split.
        client.infer("probe", probe(), request_id="7")
        with pytest.raises(InferenceServerException):
            client.infer("probe", probe(index=99), request_id="8")
        client.infer("probe", probe(), request_id="9")
        client.infer("probe", probe(rows=70), request_id="10")
        settings(client, trace_level="OFF")
        for _ in range(4):
            client.infer("probe", probe(), request_id="after")
    assert server.stop() == 0
    traces = read(path)
    assert [trace["request_id"] for trace in traces] == ["2", "4", "6", "8", "10"]
    assert [trace["id"] for trace in traces] == [1, 2, 3, 4, 5]
    assert {(trace["model_name"], trace["model_version"]) for trace in traces} == {("probe", 1)}
    assert [names(trace) for trace in traces] == [
        names(trace) if trace["request_id"] == "8" else RAN for trace in traces
    ]
    assert names(traces[3]) == [*RAN[:4], "REQUEST_END"]
    for trace in traces[:3]:
        times = {time["name"]: time["ns"] for time in trace["timestamps"]}
        # Three matrix products.
        assert times["COMPUTE_OUTPUT_START"] - times["COMPUTE_INPUT_END"] > 20_000


def test_a_models_own_settings_count_and_files(
    serve: Serve, probe_model: Path, echo_model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "traces.json"
    server = serve(probe_model, echo_model, "--trace-file", path)
    x = triton.InferInput("x", [1, 2], "FP32")
    x.set_data_from_numpy(np.zeros((1, 2), np.float32))
    answers: queue.Queue[Any] = queue.Queue()
    with triton.InferenceServerClient(server.address) as client:
        settings(client, trace_level="TIMESTAMPS", trace_rate="1", log_frequency="2")
        settings(client, "echo", trace_count="3", log_frequency="0")
        # Streams are traced like unary calls.
        client.start_stream(lambda result, error: answers.put(error or result))
        for tag in range(5):
            client.async_stream_infer("echo", [x], request_id=f"echo {tag}")
        for _ in range(5):
            assert isinstance(answers.get(timeout=30), triton.InferResult)
        client.stop_stream()
        for tag in range(3):
            client.infer("probe", probe(), request_id=f"probe {tag}")
        assert settings(client, "echo")["trace_count"] == ["0"]
        assert settings(client)["trace_count"] == ["-1"]
        settings(client, "echo", trace_count=None, log_frequency=None)
        assert settings(client, "echo") == settings(client)
    assert server.stop() == 0
    files = {file.name: [trace["request_id"] for trace in read(file)] for file in tmp_path.iterdir()}
    assert files == {
        "traces.json.0": ["echo 0", "echo 1", "echo 2"],
        "traces.json.1": ["probe 0", "probe 1"],
        "traces.json.2": ["probe 2"],
    }


def test_wrong_trace_settings_are_refused(serve: Serve, echo_model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    with triton.InferenceServerClient(serve(echo_model).address) as client:
        for model, changes, code, message in (
            (None, {"trace_file": str(other)}, "UNIMPLEMENTED", "trace file location can not be updated"),
            (None, {"trace_level": "TIMESTAMPS"}, "INVALID_ARGUMENT", "trace file name is not given"),
            (None, {"trace_rate": "x"}, "INVALID_ARGUMENT", "Unable to parse 'trace_rate', got: x"),
            ("nobody", {"trace_rate": "1"}, "INVALID_ARGUMENT", "Request for unknown model : nobody"),
        ):
            with pytest.raises(InferenceServerException) as caught:
                client.update_trace_settings(model, changes)
            assert caught.value.status() == f"StatusCode.{code}"
            assert message in caught.value.message()
        assert settings(client) == AT_FIRST
    assert not other.exists()
