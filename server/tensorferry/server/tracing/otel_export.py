"""Where OpenTelemetry's spans go: an exporter behind the SDK's queue, both as the standard variables say."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import SpanLimits
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter

from tensorferry.batcher import ResponseBurstHook
from tensorferry.server.errors import StartError
from tensorferry.server.tracing.otel import OpenTelemetrySource
from tensorferry.server.tracing.otel_sampling import sampler_of

_log = logging.getLogger("tensorferry.server")

_EXPORTER = "OTEL_TRACES_EXPORTER"
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_DISABLED = "OTEL_SDK_DISABLED"
_PROPAGATORS = "OTEL_PROPAGATORS"

# As much longer as an export that is given up may take to notice.
_NOTICE_SECONDS = 0.5


class SpanExport:
    """Spans and their way out. `source` is None where the variables switch all of it off."""

    def __init__(self, environment: Mapping[str, str], version: str, together: ResponseBurstHook) -> None:
        """StartError for variables that say what cannot be."""
        self.source: OpenTelemetrySource | None = None
        if environment.get(_DISABLED, "").strip().lower() == "true":
            _log.warning("--otel makes no spans: %s is true", _DISABLED)
            return
        sampler = sampler_of(environment)
        propagators = environment.get(_PROPAGATORS, "tracecontext")
        if "tracecontext" not in [name.strip() for name in propagators.lower().split(",")]:
            raise StartError(
                f"{_PROPAGATORS} is {propagators!r}; this server reads the W3C trace context of calls: let tracecontext be "
                "among them"
            )
        exporter = _exporter(environment)
        if exporter is None:
            _log.warning("--otel makes no spans: %s is none", _EXPORTER)
            return
        try:
            limits = SpanLimits()
            self._exporter = exporter
            self._processor = BatchSpanProcessor(exporter)
        except ValueError as error:
            raise StartError(f"the variables OTEL_* cannot be followed: {error}") from None
        self.source = OpenTelemetrySource(
            self._processor, sampler, _resource(version), limits, version, together
        )

    def stop(self, timeout: float) -> bool:
        """Whether all spans were sent, for which it waits at most so long. Idempotent; no span may be told afterwards."""
        if self.source is None:
            return True
        until = time.monotonic() + timeout
        # It waits for half a minute by itself.
        thread = threading.Thread(target=self._processor.shutdown, name="otel-shutdown", daemon=True)
        thread.start()
        thread.join(timeout)
        if not thread.is_alive():
            return time.monotonic() <= until
        # Ends the pause before another try, and the connection.
        self._exporter.shutdown()
        thread.join(_NOTICE_SECONDS)
        return False


def _exporter(environment: Mapping[str, str]) -> SpanExporter | None:
    name = environment.get(_EXPORTER, "").strip().lower() or "otlp"
    if name == "none":
        return None
    if name == "console":
        return ConsoleSpanExporter()
    if name != "otlp":
        raise StartError(f"{_EXPORTER} is {name!r}; it must be otlp, console or none")
    for variable in _PROTOCOLS:
        protocol = environment.get(variable, "").strip().lower()
        if protocol not in ("", "grpc"):
            raise StartError(
                f"{variable} is {protocol!r}; this server sends by grpc only: take it away, or say grpc"
            )
    # Here, since it takes a while to import.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    try:
        return OTLPSpanExporter()
    except Exception as error:
        raise StartError(
            f"the OTLP exporter cannot do what the variables OTEL_EXPORTER_OTLP_* say: {error}"
        ) from error


def _resource(version: str) -> Resource:
    """What the variables say of this process, and what it is called where they say nothing."""
    found = Resource.create()
    named: Any = found.attributes.get(SERVICE_NAME, "")
    ours = {SERVICE_VERSION: version}
    if not named or str(named).startswith("unknown_service"):
        return found.merge(Resource({SERVICE_NAME: "tensorferry", **ours}))
    return Resource(ours).merge(found)
