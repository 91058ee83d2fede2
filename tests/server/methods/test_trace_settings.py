"""TraceSetting: what it says of the operator's traces. tests/wire/test_log_settings.py has the rest."""

from __future__ import annotations

import pytest

from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.methods.trace_settings import TraceSettingsMethods
from tensorferry.server.models.lifecycle.registry import ModelRegistry


@pytest.mark.parametrize(("spans", "level"), [(False, "OFF"), (True, "TIMESTAMPS")])
def test_settings_say_whether_spans_are_recorded(spans: bool, level: str) -> None:
    methods = TraceSettingsMethods(ModelRegistry(), spans=spans)
    settings = methods.trace_setting(pb.TraceSettingRequest()).settings
    assert {name: ",".join(each.value) for name, each in settings.items()} == {
        "trace_file": "",
        "trace_level": level,
        "trace_rate": "1",
        "trace_count": "-1",
        "log_frequency": "0",
        "trace_mode": "opentelemetry",
    }
