"""LogSettings: lets clients read and change what the server logs, under Triton's names."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.errors import InvalidRequestError, UnsupportedError, truncate
from tensorferry.server.observability.logs.logs import LogLevels, LogOutput

_log = logging.getLogger("tensorferry.server")

# Triton's settings: the field of their value, and the name of its type in Triton's errors.
_SETTING_TYPES = {
    "log_file": ("string_param", "string"),
    "log_info": ("bool_param", "boolean"),
    "log_warning": ("bool_param", "boolean"),
    "log_error": ("bool_param", "boolean"),
    "log_verbose_level": ("uint32_param", "int32"),
    "log_format": ("string_param", "string"),
}
_DEFAULT, _ISO = "default", "ISO8601"

_CHANGES_DISABLED = (
    "Log settings can not be changed by clients of this server. Start it with --allow-log-settings to let them, or with "
    "another --log-level or --log-format"
)


class LogSettingsMethods:
    """The protocol's extension `logging`. Thread-safe.

    Changes are refused unless `allowed`. A change is made whole or not at all, and is logged as a warning before it
    takes effect.
    """

    names = ("logging",)

    def __init__(self, output: LogOutput, *, allowed: bool = False) -> None:
        self._output = output
        self._allowed = allowed

    def methods(self) -> Mapping[str, Callable[[Any], Any]]:
        """Return the method LogSettings."""
        return {"LogSettings": self.log_settings}

    def log_settings(self, request: pb.LogSettingsRequest) -> pb.LogSettingsResponse:
        """Make the changes in the request, or none if one is wrong, and return all settings."""
        levels = self._output.levels
        if request.settings:
            if not self._allowed:
                raise UnsupportedError(_CHANGES_DISABLED)
            while (changed := self._changed(levels, request.settings)) != levels:
                _log.warning("a client changes what is logged: %s", _difference(levels, changed))
                if self._output.replace(levels, changed):
                    levels = changed
                    break
                # Another change was made meanwhile, so this one is applied to its result.
                levels = self._output.levels
        response = pb.LogSettingsResponse()
        for name, value in _values(levels).items():
            setattr(response.settings[name], _SETTING_TYPES[name][0], value)
        return response

    def _changed(self, levels: LogLevels, settings: Mapping[str, Any]) -> LogLevels:
        if "log_file" in settings:
            raise UnsupportedError(
                "log file location can not be updated through network protocol: the server logs to stderr, "
                "only its operator can redirect that"
            )
        changes: dict[str, Any] = {}
        # Sorted, so that the same request always gets the same error.
        for name in sorted(settings):
            if name not in _SETTING_TYPES:
                raise InvalidRequestError(
                    f"unknown log setting {truncate(name)!r}; known are {', '.join(_SETTING_TYPES)}"
                )
            field, kind = _SETTING_TYPES[name]
            given_field = settings[name].WhichOneof("parameter_choice")
            if given_field != field:
                raise InvalidRequestError(
                    f"expect {kind} for {name!r}, in {field}; got {given_field or 'no value'}"
                )
            value = getattr(settings[name], field)
            if name == "log_format":
                changes["iso_times"] = self._iso_times(value)
            else:
                changes[name.removeprefix("log_")] = value
        return replace(levels, **changes)

    def _iso_times(self, value: str) -> bool:
        if value not in (_DEFAULT, _ISO):
            raise InvalidRequestError(
                f"invalid argument for log_format, got: {truncate(value)}; it must be {_DEFAULT} or {_ISO}"
            )
        if self._output.json and value != _ISO:
            raise InvalidRequestError(
                f"invalid argument for log_format, got: {truncate(value)}; this server logs JSON (--log-format json), whose times "
                f"are always {_ISO}"
            )
        return value == _ISO


def _values(levels: LogLevels) -> dict[str, bool | int | str]:
    return {
        "log_file": "",
        "log_info": levels.info,
        "log_warning": levels.warning,
        "log_error": levels.error,
        "log_verbose_level": levels.verbose_level,
        "log_format": _ISO if levels.iso_times else _DEFAULT,
    }


def _difference(old: LogLevels, new: LogLevels) -> str:
    before, after = _values(old), _values(new)
    return ", ".join(
        f"{name} from {before[name]} to {after[name]}" for name in before if before[name] != after[name]
    )
