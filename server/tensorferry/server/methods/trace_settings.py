"""TraceSetting: lets clients read and change what is traced, under Triton's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.errors import InvalidRequestError, ServerError, UnsupportedError, truncate
from tensorferry.server.models.registry import ModelRegistry
from tensorferry.server.tracing.triton import TritonTracing

# Triton's names. For whole numbers: the field of the options, and the smallest and largest value.
_LEVEL = "trace_level"
_NUMBERS = {
    "trace_rate": ("rate", 0, (1 << 32) - 1),
    "trace_count": ("count", -1, (1 << 31) - 1),
    "log_frequency": ("log_frequency", 0, (1 << 32) - 1),
}
_SETTINGS = ("trace_file", _LEVEL, *_NUMBERS, "trace_mode")
_MODE = "triton"


class TraceSettingsMethods:
    """The protocol's extension `trace`. Thread-safe."""

    names = ("trace",)

    def __init__(self, registry: ModelRegistry, tracing: TritonTracing) -> None:
        self._registry = registry
        self._tracing = tracing

    def methods(self) -> Mapping[str, Callable[[Any], Any]]:
        """Return the method TraceSetting."""
        return {"TraceSetting": self.trace_setting}

    def trace_setting(self, request: pb.TraceSettingRequest) -> pb.TraceSettingResponse:
        """Make the changes in the request, or none if one is wrong, and return all settings."""
        model = request.model_name
        if model:
            try:
                self._registry.get(model)
            except ServerError as error:
                raise InvalidRequestError(f"Request for unknown model : {model}; {error}") from None
        if request.settings:
            self._tracing.change(model, _changes(request.settings))
        options = self._tracing.options(model)
        response = pb.TraceSettingResponse()
        for name, value in (
            ("trace_file", self._tracing.file),
            (_LEVEL, "TIMESTAMPS" if options.timestamps else "OFF"),
            ("trace_mode", _MODE),
            *((name, str(getattr(options, field))) for name, (field, _, _) in _NUMBERS.items()),
        ):
            response.settings[name].value.append(value)
        return response


def _changes(settings: Mapping[str, Any]) -> dict[str, bool | int | None]:
    if "trace_file" in settings:
        raise UnsupportedError(
            "trace file location can not be updated through network protocol; the server's operator names it, "
            "by --trace-file"
        )
    changes: dict[str, bool | int | None] = {}
    # Sorted, so that the same request always gets the same error.
    for name in sorted(settings):
        values: Sequence[str] = settings[name].value
        if name not in _SETTINGS:
            raise InvalidRequestError(
                f"unknown trace setting {truncate(name)!r}; known are {', '.join(_SETTINGS)}"
            )
        if name == "trace_mode":
            if list(values) not in ([], [_MODE]):
                raise UnsupportedError(
                    f"trace_mode is {truncate(', '.join(values))}; this server has {_MODE} only"
                )
        elif name == _LEVEL:
            changes["timestamps"] = _timestamps(values)
        else:
            changes[_NUMBERS[name][0]] = _number(name, values)
    return changes


def _timestamps(levels: Sequence[str]) -> bool | None:
    for level in levels:
        if level == "TENSORS":
            raise UnsupportedError(
                "trace level 'TENSORS' is not supported: this server writes no contents of requests to files; "
                "use TIMESTAMPS"
            )
        if level not in ("OFF", "TIMESTAMPS"):
            raise InvalidRequestError(
                f"unknown trace level {truncate(level)!r}; it must be OFF or TIMESTAMPS"
            )
    if "OFF" in levels and len(levels) > 1:
        raise InvalidRequestError(
            f"Expect only one trace level 'OFF' is specified, got {truncate(', '.join(levels))}"
        )
    return "TIMESTAMPS" in levels if levels else None


def _number(name: str, values: Sequence[str]) -> int | None:
    _, low, high = _NUMBERS[name]
    if not values:
        return None
    if len(values) > 1:
        raise InvalidRequestError(f"expect only 1 value for {name!r}, got {len(values)}")
    # int() accepts too much: underscores, and the digits of other scripts.
    sign, digits = ("-", values[0][1:]) if values[0].startswith("-") else ("", values[0])
    if not (digits.isascii() and digits.isdecimal()):
        raise InvalidRequestError(
            f"Unable to parse {name!r}, got: {truncate(values[0])}; it must be a whole number"
        )
    # Not converted with 20 digits or more: that is out of every range, and long text takes long to convert.
    number = int(sign + digits) if len(digits) < 20 else high + 1
    if name == "trace_count" and number < low:
        raise InvalidRequestError(
            f"Unable to parse {name!r}. Expecting value >= {low}, got: {truncate(values[0])}"
        )
    if not low <= number <= high:
        raise InvalidRequestError(
            f"Unable to parse {name!r}, value is out of range [ {low}, {high} ], got: {truncate(values[0])}"
        )
    return number
