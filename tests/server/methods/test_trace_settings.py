"""TraceSetting on the wire: Triton's names, and the traces that the operator has set up."""

from __future__ import annotations

from typing import Any, cast

from support.server.rig import signature, spec

from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.methods.trace_settings import TraceSettingsMethods
from tensorferry.server.models.lifecycle.registry import Model, ModelRegistry

OFF = {
    "trace_file": [""],
    "trace_level": ["OFF"],
    "trace_rate": ["1"],
    "trace_count": ["-1"],
    "log_frequency": ["0"],
    "trace_mode": ["opentelemetry"],
}


def settings(*, spans: bool = False) -> TraceSettingsMethods:
    registry = ModelRegistry()
    registry.mark_ready(Model("m", "1", signature(spec("x", "FP32", "batch")), 8, "batched", cast(Any, None)))
    registry.mark_loading("early", "1")
    return TraceSettingsMethods(registry, spans=spans)


def settings_after(methods: TraceSettingsMethods, model: str = "", **changes: Any) -> dict[str, list[str]]:
    """All settings after these changes. None clears a setting."""
    request = pb.TraceSettingRequest(model_name=model)
    for name, values in changes.items():
        request.settings[name].value.extend([values] if isinstance(values, str) else values or [])
    response = methods.trace_setting(request)
    return {name: list(value.value) for name, value in response.settings.items()}


def test_settings_say_whether_spans_are_recorded() -> None:
    assert settings_after(settings()) == settings_after(settings(), "m") == OFF
    assert settings_after(settings(spans=True)) == OFF | {"trace_level": ["TIMESTAMPS"]}
    assert settings().names == ("trace",)
