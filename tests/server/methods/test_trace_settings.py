"""TraceSetting on the wire: Triton's names, values and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from support.server.rig import signature, spec

from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.errors import InvalidRequestError, UnsupportedError
from tensorferry.server.methods.trace_settings import TraceSettingsMethods
from tensorferry.server.models.registry import Model, ModelRegistry
from tensorferry.server.tracing.triton import TritonTracing
from tensorferry.server.tracing.triton_file import TraceFile

INITIAL = {
    "trace_file": ["traces.json"],
    "trace_level": ["OFF"],
    "trace_rate": ["1000"],
    "trace_count": ["-1"],
    "log_frequency": ["0"],
    "trace_mode": ["triton"],
}


@pytest.fixture
def settings() -> TraceSettingsMethods:
    registry = ModelRegistry()
    registry.mark_ready(Model("m", "1", signature(spec("x", "FP32", "batch")), 8, "batched", cast(Any, None)))
    registry.mark_loading("early", "1")
    return TraceSettingsMethods(registry, TritonTracing(TraceFile(Path("traces.json"))))


def settings_after(settings: TraceSettingsMethods, model: str = "", **changes: Any) -> dict[str, list[str]]:
    """All settings after these changes. None clears a setting."""
    request = pb.TraceSettingRequest(model_name=model)
    for name, values in changes.items():
        request.settings[name].value.extend([values] if isinstance(values, str) else values or [])
    response = settings.trace_setting(request)
    return {name: list(value.value) for name, value in response.settings.items()}


def test_settings_are_read(settings: TraceSettingsMethods) -> None:
    assert settings_after(settings) == settings_after(settings, "m") == INITIAL
    assert settings.names == ("trace",)


def test_settings_are_changed_and_cleared(settings: TraceSettingsMethods) -> None:
    changes: dict[str, Any] = {
        "trace_level": ["TIMESTAMPS"],
        "trace_rate": ["4294967295"],
        "log_frequency": ["10"],
    }
    assert settings_after(settings, **changes) == INITIAL | changes
    assert settings_after(settings, "m", trace_rate="7", trace_count="-1") == INITIAL | changes | {
        "trace_rate": ["7"]
    }
    assert settings_after(settings, trace_count="2147483647")["trace_count"] == ["2147483647"]
    assert settings_after(settings, "m")["trace_count"] == ["-1"]
    assert settings_after(settings, "m", trace_count=None, trace_rate=None) == settings_after(settings)
    assert settings_after(settings, trace_level="OFF")["trace_level"] == ["OFF"]
    cleared: dict[str, Any] = dict.fromkeys(("trace_level", "trace_rate", "trace_count", "log_frequency"))
    assert settings_after(settings, **cleared) == INITIAL


def test_the_mode_can_be_given_but_not_changed(settings: TraceSettingsMethods) -> None:
    assert settings_after(settings, trace_mode="triton") == INITIAL
    with pytest.raises(UnsupportedError, match="trace_mode is opentelemetry; this server has triton only"):
        settings_after(settings, trace_mode="opentelemetry")


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("trace_rate", "many", "Unable to parse 'trace_rate', got: many"),
        ("trace_rate", "", "Unable to parse 'trace_rate', got: ;"),
        ("trace_rate", "1_0", "Unable to parse 'trace_rate', got: 1_0"),
        ("trace_rate", "１", "Unable to parse 'trace_rate', got: １"),
        ("trace_rate", "1.5", "Unable to parse 'trace_rate', got: 1.5"),
        ("trace_rate", "-", "Unable to parse 'trace_rate', got: -"),
        ("trace_rate", "-1", "value is out of range [ 0, 4294967295 ], got: -1"),
        ("trace_rate", "4294967296", "value is out of range [ 0, 4294967295 ]"),
        ("log_frequency", "9" * 10_000, "Unable to parse 'log_frequency', value is out of range"),
        ("trace_count", "-2", "Unable to parse 'trace_count'. Expecting value >= -1, got: -2"),
        ("trace_count", "2147483648", "value is out of range [ -1, 2147483647 ], got: 2147483648"),
        ("trace_count", ["1", "2"], "expect only 1 value for 'trace_count', got 2"),
        ("trace_level", ["OFF", "TIMESTAMPS"], "Expect only one trace level 'OFF' is specified"),
        ("trace_level", "MAX", "unknown trace level 'MAX'; it must be OFF or TIMESTAMPS"),
        ("trace_speed", "1", "unknown trace setting 'trace_speed'; known are trace_file, trace_level"),
    ],
)
def test_wrong_values_are_refused(
    settings: TraceSettingsMethods, name: str, values: Any, message: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        settings_after(settings, **{"log_frequency": "5", name: values})
    assert message in str(caught.value)
    assert settings_after(settings) == INITIAL


@pytest.mark.parametrize("values", ["other.json", "", None])
def test_clients_cannot_change_the_trace_file(settings: TraceSettingsMethods, values: Any) -> None:
    with pytest.raises(
        UnsupportedError, match="trace file location can not be updated through network protocol"
    ):
        settings_after(settings, trace_file=values, trace_level="TIMESTAMPS")
    assert settings_after(settings) == INITIAL


def test_tracing_of_tensors_is_refused(settings: TraceSettingsMethods) -> None:
    with pytest.raises(UnsupportedError, match="this server writes no contents of requests to files"):
        settings_after(settings, trace_level=["TIMESTAMPS", "TENSORS"])
    assert settings_after(settings) == INITIAL


@pytest.mark.parametrize("model", ["other", "early"])
def test_an_unknown_model_is_refused(settings: TraceSettingsMethods, model: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"Request for unknown model : {model}; "):
        settings_after(settings, model)
    with pytest.raises(InvalidRequestError):
        settings_after(settings, model, trace_rate="1")
