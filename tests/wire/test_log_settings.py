"""tritonclient reads the log and trace settings of a real server, and changes those of the log."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from support.processes.server import SERVER_PROCESSES, ServerProcess, running
from support.wire.inputs import probe
from tritonclient.utils import InferenceServerException

AT_FIRST = {
    "log_file": {"string_param": ""},
    "log_info": {"bool_param": True},
    "log_warning": {"bool_param": True},
    "log_error": {"bool_param": True},
    "log_verbose_level": {"uint32_param": 0},
    # The tests' servers log JSON.
    "log_format": {"string_param": "ISO8601"},
}


@pytest.fixture(scope="module")
def server(transport: str, probe_model: Path) -> Iterator[ServerProcess]:
    with running(probe_model, "--allow-log-settings", transport=transport) as server:
        yield server


def failing(client: triton.InferenceServerClient, request_id: str) -> None:
    """A failing request: a warning in the log, and a debug line for its response."""
    with pytest.raises(InferenceServerException, match="INTERNAL"):
        client.infer("probe", probe(index=99), request_id=request_id)


async def test_wrong_log_settings_are_refused(server: ServerProcess) -> None:
    refused: list[tuple[dict[str, Any], str, str]] = [
        (
            {"log_file": "elsewhere.log"},
            "UNIMPLEMENTED",
            "log file location can not be updated through network protocol",
        ),
        ({"log_info": None}, "INVALID_ARGUMENT", "expect boolean for 'log_info'"),
        ({"log_format": "yaml"}, "INVALID_ARGUMENT", "invalid argument for log_format, got: yaml"),
        ({"verbose": True}, "INVALID_ARGUMENT", "unknown log setting 'verbose'"),
    ]
    async with triton_aio.InferenceServerClient(server.address) as client:
        for settings, code, message in refused:
            with pytest.raises(InferenceServerException) as caught:
                await client.update_log_settings(settings)
            assert caught.value.status() == f"StatusCode.{code}"
            assert message in caught.value.message()
            assert (await client.get_log_settings(as_json=True))["settings"] == AT_FIRST


def test_settings_have_effect(server: ServerProcess) -> None:
    """It is the last test of the server, which it stops."""
    with triton.InferenceServerClient(server.address) as client:
        assert client.get_log_settings(as_json=True)["settings"] == AT_FIRST
        failing(client, "first")
        answer = client.update_log_settings({"log_verbose_level": 2, "log_warning": False}, as_json=True)
        changed = {"log_verbose_level": {"uint32_param": 2}, "log_warning": {"bool_param": False}}
        assert answer["settings"] == AT_FIRST | changed == client.get_log_settings(as_json=True)["settings"]
        failing(client, "second")
        client.update_log_settings({"log_verbose_level": 0, "log_warning": True})
        failing(client, "third")
        client.update_log_settings({"log_info": False})
        assert "logging" in client.get_server_metadata().extensions
    assert server.stop() == 0
    lines: list[dict[str, Any]] = [json.loads(line) for line in server.log]
    warned = [
        line["message"]
        for line in lines
        if line["level"] == "warning" and "is batched unchecked" not in line["message"]
    ]
    assert [message.partition(":")[0] for message in warned] == [
        "model probe failed on request 'first'",
        "a client changes what is logged",
        "model probe failed on request 'third'",
        "a client changes what is logged",
    ]
    assert warned[1].endswith(": log_warning from True to False, log_verbose_level from 0 to 2")
    debugged = [line["message"] for line in lines if line["level"] == "debug"]
    assert len(debugged) == 1
    assert debugged[0].startswith("answering with INTERNAL: ")
    # A supervisor keeps the settings of the command line.
    assert SERVER_PROCESSES or not any("SIGTERM" in line["message"] for line in lines)


def test_trace_settings_are_read_and_not_changed(plain: ServerProcess) -> None:
    with triton.InferenceServerClient(plain.address) as client:
        assert "trace" in client.get_server_metadata().extensions
        before = client.get_trace_settings(as_json=True)
        assert before["settings"]["trace_level"] == {"value": ["OFF"]}
        assert client.update_trace_settings(settings={"trace_level": None}, as_json=True) == before
        for model, changes, code, message in (
            (None, {"trace_level": "TIMESTAMPS"}, "UNIMPLEMENTED", "by --otel and the variables OTEL_"),
            ("echo", {"trace_rate": "7"}, "UNIMPLEMENTED", "trace_rate is '1', and cannot be changed to '7'"),
            ("nobody", {"trace_rate": "1"}, "INVALID_ARGUMENT", "Request for unknown model : nobody"),
        ):
            with pytest.raises(InferenceServerException) as caught:
                client.update_trace_settings(model, changes)
            assert caught.value.status() == f"StatusCode.{code}"
            assert message in caught.value.message()
        assert client.get_trace_settings("echo", as_json=True) == before
