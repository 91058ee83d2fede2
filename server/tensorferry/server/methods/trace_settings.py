"""TraceSetting: what is traced, under Triton's names. The operator decides that, not clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.errors import InvalidRequestError, ServerError, UnsupportedError, truncate
from tensorferry.server.models.lifecycle.registry import ModelRegistry


class TraceSettingsMethods:
    """The protocol's extension `trace`. Thread-safe. `spans` says whether OpenTelemetry spans are recorded."""

    names = ("trace",)

    def __init__(self, registry: ModelRegistry, *, spans: bool) -> None:
        self._registry = registry
        # The sampler that the environment names chooses among all requests.
        self._settings = {
            "trace_file": "",
            "trace_level": "TIMESTAMPS" if spans else "OFF",
            "trace_rate": "1",
            "trace_count": "-1",
            "log_frequency": "0",
            "trace_mode": "opentelemetry",
        }

    def methods(self) -> Mapping[str, Callable[[Any], Any]]:
        """Return the method TraceSetting."""
        return {"TraceSetting": self.trace_setting}

    def trace_setting(self, request: pb.TraceSettingRequest) -> pb.TraceSettingResponse:
        """Return all settings, which are the same for all models. UnsupportedError if the request would change one."""
        model = request.model_name
        if model:
            try:
                self._registry.get(model)
            except ServerError as error:
                raise InvalidRequestError(f"Request for unknown model : {model}; {error}") from None
        # Sorted, so that the same request always gets the same error.
        for name in sorted(request.settings):
            values = list(request.settings[name].value)
            if name not in self._settings:
                raise InvalidRequestError(
                    f"unknown trace setting {truncate(name)!r}; known are {', '.join(self._settings)}"
                )
            # Without a value it would be cleared.
            if values not in ([], [self._settings[name]]):
                raise UnsupportedError(
                    f"{name} is {self._settings[name]!r}, and cannot be changed to {truncate(', '.join(values))!r}: requests are "
                    "traced by OpenTelemetry, which the server's operator sets up by --otel and the variables OTEL_*"
                )
        response = pb.TraceSettingResponse()
        for name, value in self._settings.items():
            response.settings[name].value.append(value)
        return response
