"""LogSettings: times change their form, and a change that another client makes meanwhile is kept."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from polling import PATIENCE
from support.server import log_lines

from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.methods.log_settings import LogSettingsMethods
from tensorferry.server.observability.logs import logs

DEFAULTS = {
    "log_file": "",
    "log_info": True,
    "log_warning": True,
    "log_error": True,
    "log_verbose_level": 0,
    "log_format": "default",
}


@pytest.fixture(autouse=True)
def _root(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Waits for the writer as long as it takes, and restores the root logger after the test."""
    monkeypatch.setattr(logs.LogOutput.flush, "__defaults__", (PATIENCE,))
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def request(**settings: Any) -> pb.LogSettingsRequest:
    message = pb.LogSettingsRequest()
    for name, value in settings.items():
        field = {bool: "bool_param", int: "uint32_param", str: "string_param"}[type(value)]
        setattr(message.settings[name], field, value)
    return message


def values(response: pb.LogSettingsResponse) -> dict[str, Any]:
    return {
        name: getattr(value, value.WhichOneof("parameter_choice") or "")
        for name, value in response.settings.items()
    }


def settings_after(settings: LogSettingsMethods, **changes: Any) -> dict[str, Any]:
    return values(settings.log_settings(request(**changes)))


def test_times_in_text_change_to_iso_8601_and_back(capfd: pytest.CaptureFixture[str]) -> None:
    settings = LogSettingsMethods(logs.configure("text", "info"), allowed=True)
    record = logging.makeLogRecord(
        {"levelno": 20, "levelname": "INFO", "msg": "line", "created": 1_700_000_000.0}
    )
    assert settings_after(settings, log_format="ISO8601")["log_format"] == "ISO8601"
    log_lines.written(capfd)
    logging.getLogger("some").handle(record)
    assert log_lines.written(capfd) == "2023-11-14T22:13:20Z INFO    line\n"
    assert settings_after(settings, log_format="default")["log_format"] == "default"
    log_lines.written(capfd)
    logging.getLogger("some").handle(record)
    assert log_lines.written(capfd).endswith(":13:20 INFO    line\n")


def test_a_concurrent_change_is_kept() -> None:
    output = logs.configure("text", "info")
    settings = LogSettingsMethods(output, allowed=True)

    class Between(logging.Handler):
        """Makes another client's change while the first one is logged."""

        def emit(self, record: logging.LogRecord) -> None:
            levels = output.levels
            if levels.error:
                assert output.replace(levels, dataclasses.replace(levels, error=False))

    handler = Between()
    logging.getLogger("tensorferry.server").addHandler(handler)
    try:
        assert settings_after(settings, log_verbose_level=1) == DEFAULTS | {
            "log_verbose_level": 1,
            "log_error": False,
        }
    finally:
        logging.getLogger("tensorferry.server").removeHandler(handler)
