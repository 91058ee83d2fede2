"""The current OpenTelemetry context is sent with each call; without one nothing is imported."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from client.scripted import ScriptedServer
from opentelemetry import baggage, context, trace
from opentelemetry.sdk.trace import TracerProvider

from tensorferry.client import InferenceClient
from tensorferry.client.connection.propagation import with_context

IMAGES = {"image": np.zeros((1, 8, 8), np.uint8)}


@pytest.fixture
def span() -> Iterator[trace.Span]:
    with TracerProvider().get_tracer("test").start_as_current_span("caller") as span:
        yield span


def ids_of(span: trace.Span) -> str:
    ids = span.get_span_context()
    return f"00-{ids.trace_id:032x}-{ids.span_id:016x}-"


def test_every_kind_of_call_carries_the_current_span(server: ScriptedServer, span: trace.Span) -> None:
    with InferenceClient(server.target) as client:
        client.infer("digits", IMAGES)
        client.submit("digits", IMAGES).result(30)
        list(client.stream("digits", [IMAGES]))
    assert {"ModelInfer", "ModelStreamInfer", "ModelMetadata"} <= set(server.servicer.calls)
    for metadata in server.servicer.call_metadata:
        assert str(metadata["traceparent"]).startswith(ids_of(span))


def test_no_span_no_context(server: ScriptedServer) -> None:
    with InferenceClient(server.target, metadata=[("a", "b")]) as client:
        client.infer("digits", IMAGES)
    assert "traceparent" not in server.servicer.call_metadata[-1]
    given = (("a", "b"),)
    assert with_context(given) is given


def test_metadata_of_the_caller_takes_precedence(server: ScriptedServer, span: trace.Span) -> None:
    own = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"
    with InferenceClient(server.target, metadata=[("Traceparent", own)]) as client:
        client.infer("digits", IMAGES)
    assert server.servicer.call_metadata[-1]["traceparent"] == own


def test_tracestate_of_another_trace_is_dropped() -> None:
    state = trace.TraceState([("vendor", "x")])
    ids = trace.SpanContext(1, 2, False, trace.TraceFlags(1), state)
    with trace.use_span(trace.NonRecordingSpan(ids)):
        assert dict(with_context(()))["tracestate"] == "vendor=x"
        assert dict(with_context((("traceparent", "mine"),))) == {"traceparent": "mine"}


def test_baggage_is_sent_without_a_span() -> None:
    token = context.attach(baggage.set_baggage("tenant", "a b"))
    try:
        assert with_context((("x", "y"),)) == (("x", "y"), ("baggage", "tenant=a+b"))
    finally:
        context.detach(token)


def test_the_client_does_not_import_opentelemetry() -> None:
    program = (
        "import sys; from tensorferry.client.connection.propagation import with_context; "
        "assert with_context((('a', 'b'),)) == (('a', 'b'),); "
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
