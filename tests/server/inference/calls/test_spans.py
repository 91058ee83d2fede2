"""Spans of OpenTelemetry for calls between models."""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np
import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import SpanKind
from polling import until
from support.server.calling_models import World
from support.server.rig import Replies, request, response_of
from support.server.spans import SAMPLED, UNSAMPLED, Exported, of

from tensorferry.server.observability.tracing.access_log import AccessLog
from tensorferry.server.observability.tracing.otel import OpenTelemetrySource
from tensorferry.server.observability.tracing.otel_export import sampler_of
from tensorferry.server.transport.lane.batched_sends import ResponseBatcher
from tensorferry.serving import FP32, infer, model


@model(inputs={"x": FP32[-1]}, outputs={"y": FP32[-1]})
def inner(x: Any) -> Any:
    return 2 * x


@model(inputs={"x": FP32[-1]}, outputs={"y": FP32[-1]})
def middle(x: Any) -> Any:
    return infer("inner", x=x)["y"]


@model(inputs={"x": FP32[-1]}, outputs={"y": FP32[-1]})
def outer(x: Any) -> Any:
    return infer("middle", x=x)["y"]


def spans_of_a_request(
    world: World, monkeypatch: pytest.MonkeyPatch, parent: str, count: int
) -> dict[str, Any]:
    """So many spans of requests by name, of a request that needs all three models."""
    exporter = Exported()
    source = OpenTelemetrySource(
        SimpleSpanProcessor(exporter), sampler_of({}), Resource({}), SpanLimits(), "1", ResponseBatcher()
    )
    for declared in (inner, middle, outer):
        world.load(declared)
    world.tracer.add(source)
    # With an access log, every request has a trace, but a call has a span only below another.
    monkeypatch.setattr(logging.getLogger("tensorferry.access"), "level", logging.INFO)
    world.tracer.add(AccessLog(10))
    replies = Replies()
    data = request({"x": np.ones(2, "f4")}, model="outer", id="one").SerializeToString()
    world.service.submit(data, math.inf, replies, [("traceparent", parent)])
    reply = replies.first()
    assert response_of(reply).id == "one"
    assert reply.trace is not None
    reply.trace.sent()

    def spans() -> dict[str, Any]:
        return {
            span.name: span
            for span in exporter.get_finished_spans()
            if "tensorferry.request.id" in (span.attributes or {})
        }

    # A call's span ends after its answer.
    return until(spans, lambda found: len(found) >= count)


def test_a_call_is_a_span_below_that_of_the_calling_request(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans = spans_of_a_request(world, monkeypatch, SAMPLED, 3)
    assert sorted(spans) == ["call inner", "call middle", "inference.GRPCInferenceService/ModelInfer"]
    called, calling, whole = (spans[name] for name in sorted(spans))
    assert called.parent.span_id == calling.context.span_id
    assert calling.parent.span_id == whole.context.span_id
    assert (called.kind, calling.kind, whole.kind) == (SpanKind.INTERNAL, SpanKind.INTERNAL, SpanKind.SERVER)
    attributes = of(called)
    assert attributes["tensorferry.call.model"] == "middle"
    assert attributes["tensorferry.model.name"] == "inner"
    assert attributes["tensorferry.request.id"] == "one"
    assert attributes["tensorferry.request.rows"] == 2
    assert not [name for name in attributes if name.startswith("rpc.")]


def test_calls_of_requests_that_are_not_sampled_have_no_spans(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert spans_of_a_request(world, monkeypatch, UNSAMPLED, 0) == {}
