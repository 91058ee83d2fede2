"""Sampling of requests, and export of OpenTelemetry spans through the SDK's queue, configured by the standard variables.

The SDK's own samplers need a context, attributes and a name. Creating these would be the greatest part of an unsampled
request's cost.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import SpanLimits
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter

from tensorferry.batcher import ResponseBurstHook
from tensorferry.server.errors import StartError
from tensorferry.server.observability.logs.trace_context import TraceContext
from tensorferry.server.observability.tracing.otel import OpenTelemetrySource, Sampler
from tensorferry.server.system.threads import ThreadKind, new_thread

_log = logging.getLogger("tensorferry.server")

_SAMPLER, _ARGUMENT = "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG"
_EXPORTER = "OTEL_TRACES_EXPORTER"
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_DISABLED = "OTEL_SDK_DISABLED"
_PROPAGATORS = "OTEL_PROPAGATORS"

# Time for an aborted export to end.
_ABORT_SECONDS = 0.5

# The decision depends on the last 64 bits of the trace id, as in the SDKs, so all services agree.
_BITS = (1 << 64) - 1
_PARENT_BASED = "parentbased_"
_NAMES = ("always_on", "always_off", "traceidratio")


class SpanExport:
    """Trace source for spans, and their exporter. `source` is None if the variables disable OpenTelemetry."""

    def __init__(self, response_hook: ResponseBurstHook) -> None:
        """Create the exporter. StartError for invalid variables."""
        environment, release = os.environ, version("tensorferry")
        self.source: OpenTelemetrySource | None = None
        if environment.get(_DISABLED, "").strip().lower() == "true":
            _log.warning("--otel has no effect: %s is true", _DISABLED)
            return
        sampler = sampler_of(environment)
        propagators = environment.get(_PROPAGATORS, "").strip() or "tracecontext"
        if "tracecontext" not in [name.strip() for name in propagators.lower().split(",")]:
            raise StartError(
                f"{_PROPAGATORS} is {propagators!r}; this server reads the W3C trace context of calls: add tracecontext"
            )
        exporter = _exporter(environment)
        if exporter is None:
            _log.warning("--otel has no effect: %s is none", _EXPORTER)
            return
        try:
            limits = SpanLimits()
            self._exporter = exporter
            self._processor = BatchSpanProcessor(exporter)
        except ValueError as error:
            raise StartError(f"a variable OTEL_* is invalid: {error}") from None
        self.source = OpenTelemetrySource(
            self._processor, sampler, _resource(release), limits, release, response_hook
        )

    def stop(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds for all spans to be sent. Return whether they were. Idempotent."""
        if self.source is None:
            return True
        until = time.monotonic() + timeout
        # On a thread, because it may wait for half a minute.
        thread = new_thread("otel-shutdown", self._processor.shutdown, ThreadKind.EXPENDABLE)
        thread.start()
        thread.join(timeout)
        if not thread.is_alive():
            return time.monotonic() <= until
        # Ends the pause before a retry, and the connection.
        self._exporter.shutdown()
        thread.join(_ABORT_SECONDS)
        return False


def sampler_of(environment: Mapping[str, str]) -> Sampler:
    """Return the sampler that the standard variables name. StartError for an unknown one."""
    given = environment.get(_SAMPLER, "").strip().lower() or f"{_PARENT_BASED}always_on"
    name = given.removeprefix(_PARENT_BASED)
    if name not in _NAMES:
        allowed = ", ".join((*_NAMES, *(_PARENT_BASED + each for each in _NAMES)))
        raise StartError(f"{_SAMPLER} is {given!r}; it must be one of {allowed}")
    bound = {"always_on": _BITS + 1, "always_off": 0}.get(name)
    if bound is None:
        bound = round(_ratio(environment) * (_BITS + 1))
    return _sampler(bound, by_parent=given != name)


def _ratio(environment: Mapping[str, str]) -> float:
    text = environment.get(_ARGUMENT, "").strip() or "1"
    try:
        ratio = float(text)
    except ValueError:
        ratio = -1.0
    if not 0 <= ratio <= 1:
        raise StartError(f"{_ARGUMENT} is {text!r}; it must be a share of the traces, from 0 to 1")
    return ratio


def _sampler(bound: int, *, by_parent: bool) -> Sampler:
    bits = random.SystemRandom().getrandbits(64)
    # Ids need not be unpredictable, and a system call for each id would cost several times as much.
    new_id = random.Random(bits).getrandbits

    def sample(parent: TraceContext | None) -> int | None:
        if parent is not None:
            trace_id = int(parent.trace_id, 16)
            sampled = parent.sampled if by_parent else trace_id & _BITS < bound
        else:
            trace_id = new_id(128)
            # Zero is not a valid id.
            sampled = trace_id & _BITS < bound and trace_id != 0
        return trace_id if sampled else None

    return sample


def _exporter(environment: Mapping[str, str]) -> SpanExporter | None:
    name = environment.get(_EXPORTER, "").strip().lower() or "otlp"
    if name == "none":
        return None
    if name == "console":
        return ConsoleSpanExporter()
    if name != "otlp":
        raise StartError(f"{_EXPORTER} is {name!r}; it must be otlp, console or none")
    given = [(name, text) for name in _PROTOCOLS if (text := environment.get(name, "").strip().lower())]
    # The first one takes precedence.
    for variable, protocol in given[:1]:
        if protocol != "grpc":
            raise StartError(
                f"{variable} is {protocol!r}; this server supports only grpc: remove the variable, or set it to grpc"
            )
    # Imported only if needed, because it is slow to import.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    try:
        return OTLPSpanExporter()
    except Exception as error:
        raise StartError(
            f"the OTLP exporter does not accept the variables OTEL_EXPORTER_OTLP_*: {error}"
        ) from error


def _resource(release: str) -> Resource:
    """Return the resource from the variables, with a default service name."""
    found = Resource.create()
    named: Any = found.attributes.get(SERVICE_NAME, "")
    of_release = {SERVICE_VERSION: release}
    if not named or str(named).startswith("unknown_service"):
        return found.merge(Resource({SERVICE_NAME: "tensorferry", **of_release}))
    return Resource(of_release).merge(found)
