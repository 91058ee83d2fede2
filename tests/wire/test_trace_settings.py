"""tritonclient reads trace settings, and is told that clients cannot change them."""

from __future__ import annotations

import pytest
import tritonclient.grpc as triton
from support.processes.server import ServerProcess
from tritonclient.utils import InferenceServerException


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
